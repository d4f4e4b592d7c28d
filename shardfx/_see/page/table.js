// The table of arrays: search, filter, sort, and the details of a row below it.

const PAGE = 100;
const COLUMNS = [
  { name: 'path', value: (row) => row.path },
  { name: 'arrays', value: (row) => row.arrays, number: true },
  { name: 'array', value: (row) => row.array },
  { name: 'spec', value: (row) => specText(row.spec) },
  { name: 'bytes/device', value: (row) => row.bytes_per_device, number: true },
  { name: 'why', value: (row) => whyText(row) },
];

class Table {
  constructor(table, more, count) {
    Object.assign(this, { table, more, count, rows: DATA.rows, sort: 4, down: true, shown: PAGE, open: new Set() });
    this.body = el('tbody');
    this.heads = COLUMNS.map((column, at) => el('th', { scope: 'col', class: column.number ? 'number' : null },
      el('button', { type: 'button', onclick: () => this.sortBy(at) }, column.name)));
    table.append(el('thead', {}, el('tr', {}, this.heads)), this.body);
    more.addEventListener('click', () => this.showMore());
    this.draw();
  }

  sortBy(at) {
    this.down = at === this.sort ? !this.down : !!COLUMNS[at].number;
    this.sort = at;
    this.draw();
  }

  show(rows) {
    this.rows = rows;
    this.shown = PAGE;
    this.draw();
  }

  showMore() {
    const first = this.shown;
    this.shown += PAGE;
    this.draw();
    const next = this.body.querySelectorAll('button.row')[first];
    if (next) next.focus();
  }

  draw() {
    const value = COLUMNS[this.sort].value, sign = this.down ? -1 : 1;
    const sorted = [...this.rows].sort((a, b) => sign * compared(value(a), value(b)) || a.index - b.index);
    this.body.replaceChildren(...sorted.slice(0, this.shown).flatMap((row) => this.linesOf(row)));
    if (!sorted.length) this.body.append(el('tr', {}, el('td', { colspan: COLUMNS.length }, 'No array matches.')));
    this.heads.forEach((head, at) => {
      head.setAttribute('aria-sort', at !== this.sort ? 'none' : this.down ? 'descending' : 'ascending');
    });
    const left = sorted.length - this.shown, arrays = sum(this.rows, (row) => row.arrays);
    this.more.hidden = left <= 0;
    this.more.textContent = `Show ${numberText(Math.min(left, PAGE))} more of ${numberText(left)}`;
    const share = bytesText(sum(this.rows, (row) => row.bytes_per_device));
    this.count.textContent = `${counted(arrays, 'array')} in ${counted(this.rows.length, 'row')}, ${share} per device`;
  }

  linesOf(row) {
    const open = this.open.has(row.index), name = el('bdi', {}, shortened(pathText(row.path), 300));
    const button = el('button', { type: 'button', class: 'row', 'aria-expanded': `${open}`,
      onclick: () => this.toggle(row) }, name);
    const cells = [
      el('td', { class: 'mono', 'data-name': 'path' }, button),
      el('td', { class: 'number', 'data-name': 'arrays' }, numberText(row.arrays)),
      el('td', { class: 'mono', 'data-name': 'array' }, row.array),
      el('td', { 'data-name': 'spec' }, el('span', { class: 'spec' }, swatch(cutsOf(row)),
        el('bdi', { class: 'mono' }, specText(row.spec)))),
      el('td', { class: 'number', 'data-name': 'bytes/device' }, meter(row.bytes_per_device), bytesText(row.bytes_per_device)),
      el('td', { class: 'why', 'data-name': 'why' }, whyOf(row)),
    ];
    const line = el('tr', { 'data-row': row.index }, cells);
    if (!open) return [line];
    return [line, el('tr', { class: 'open' }, el('td', { colspan: COLUMNS.length }, detailsOf(row)))];
  }

  toggle(row) {
    if (!this.open.delete(row.index)) this.open.add(row.index);
    this.draw();
    this.body.querySelector(`[data-row="${row.index}"] button`).focus();
  }
}

function compared(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}

function whyText(row) {
  return [...row.reasons.map((reason) => reason.code), row.rule || ''].join(' ');
}

function whyOf(row) {
  const codes = [...new Set(row.reasons.map((reason) => reason.code).filter((code) => code !== 'scalar'))];
  return [...codes.map((code) => el('span', { class: 'tag' }, code)), ' ', el('bdi', {}, shortened(row.rule || '', 120))];
}

function meter(bytes) {
  const most = Math.max(...MOST_BYTES), width = most ? (60 * bytes) / most : 0;
  return svg('svg', { class: 'meter', width: 60, height: 8, 'aria-hidden': 'true' },
    svg('rect', { width: 60, height: 8, rx: 2, class: 'meter-back' }), svg('rect', { width, height: 8, rx: 2, class: 'meter-bar' }));
}

const MOST_BYTES = [DATA.rows.reduce((most, row) => Math.max(most, row.bytes_per_device), 0)];

/** The rows that have every word of a search in their path, spec, rule or reasons. */
function searched(rows, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => ({ word, path: pathPattern(word) }));
  return rows.filter((row) => words.every(({ word, path }) => haystack(row).includes(word) || onPath(path, row)));
}

function haystack(row) {
  row.text ??= [row.path, row.array, specText(row.spec), row.rule, row.memory_kind, ...(row.names || []),
    ...row.reasons.flatMap((reason) => [reason.code, reason.message])].join(' ').toLowerCase();
  return row.text;
}

/** A pattern that finds `layers/17/w` in `layers/{0..31}/w`: a number may stand in a range. */
function pathPattern(word) {
  if (!/\d/.test(word)) return null;
  const numbers = [];
  const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, '\\$&').replace(/(?<![a-z0-9])\d{1,18}(?![a-z0-9])/g, (digits) => {
    numbers.push(Number(digits));
    return `(${digits}|\\{[^{}]*\\})`;
  });
  return numbers.length ? { pattern: new RegExp(escaped), numbers } : null;
}

function onPath(path, row) {
  const found = path && path.pattern.exec(row.path.toLowerCase());
  return !!found && path.numbers.every((number, at) => inRange(number, found[at + 1]));
}

function inRange(number, text) {
  if (!text.startsWith('{')) return Number(text) === number;
  const runs = text.slice(1, -1).split(','), ends = text.match(/\d+/g).map(Number);
  // Of many runs the middle ones are left out: then anything between the ends may be meant.
  if (runs.includes('..')) return number >= ends[0] && number <= ends[ends.length - 1];
  return runs.some((run) => {
    const [first, last = first] = run.split('..').map(Number);
    return number >= first && number <= last;
  });
}

const LESS = 'less than was asked', WHOLE = 'whole on every device';

/** What the menu beside the search offers, and which rows each choice keeps. */
function filters() {
  const cut = (name) => (row) => cutsOf(row).includes(name);
  return [
    ['all arrays', () => true],
    [LESS, (row) => row.less],
    [WHOLE, (row) => !cutsOf(row).length],
    ...[...AXES.values()].filter((axis) => axis.size > 1).map((axis) => [`cut by ${axis.name}`, cut(axis.name)]),
  ];
}
