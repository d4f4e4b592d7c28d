// One array, or a group of alike arrays, in full: per dimension what was asked for, what it got, and why.

function detailsOf(row) {
  const count = row.arrays === 1 ? row.array : `${numberText(row.arrays)} arrays of ${row.array}`;
  const facts = [
    ['given by', row.rule || 'no rule'],
    ['asked', row.strategies.join(' | ')],
    ['memory', row.memory_kind],
    ['one array', `${bytesText(row.one.bytes)}, ${bytesText(row.one.bytes_per_device)} of it on each device`],
    ['in all', row.arrays === 1 ? null : `${bytesText(row.bytes)}, ${bytesText(row.bytes_per_device)} on each device`],
  ];
  return [
    el('h3', { class: 'path' }, el('bdi', {}, pathText(row.path))),
    el('p', { class: 'mono' }, count),
    el('div', { class: 'cut' }, cutPicture(row), row.shape.length ? dimensionTable(row) : null),
    el('dl', {}, facts.filter(([, value]) => value).map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
    row.reasons.length ? el('ul', { class: 'reasons' }, row.reasons.map(reasonItem)) : null,
  ].filter(Boolean);
}

function reasonItem(reason) {
  const where = reason.dim === null ? '' : `dim ${reason.dim}: `;
  return el('li', {}, el('span', { class: 'tag' }, reason.code), ' ', `${where}${reason.message}`);
}

function dimensionTable(row) {
  const header = ['dim', 'size', 'asked', 'given', 'on a device'];
  const named = row.names !== null;
  const lines = row.shape.map((size, at) => {
    const cells = [
      named ? `${at} ${row.names[at] ?? ''}` : `${at}`,
      numberText(size),
      specText([row.requested[at] ?? []]),
      specText([row.spec[at]]),
      numberText(row.shard_shape[at]),
    ];
    const less = row.lost.includes(at);
    return el('tr', { class: less ? 'less' : null }, cells.map((text) => el('td', {}, el('bdi', {}, text))));
  });
  return el('table', { class: 'dims' }, el('thead', {}, el('tr', {}, header.map((text) => el('th', {}, text)))),
    el('tbody', {}, lines));
}

const MOST_LINES = 32;

/** The array's last two dimensions that are cut, or its last two, as a sheet with the lines along which it is cut. */
function cutPicture(row) {
  const counts = row.shape.map((size, at) => (row.shard_shape[at] ? size / row.shard_shape[at] : 1));
  const cut = counts.map((count, at) => at).filter((at) => counts[at] > 1);
  const rest = counts.map((_, at) => at).filter((at) => counts[at] === 1).reverse();
  const shown = [...cut.slice(-2), ...rest].slice(0, 2).sort((a, b) => a - b);
  if (!shown.length) return null;
  const [down, across] = shown.length === 2 ? shown : [null, shown[0]];
  const [height, width] = sheetSize(down === null ? 1 : row.shape[down], row.shape[across], down === null);
  const rows = down === null ? 1 : counts[down], columns = counts[across];
  const lines = [...cutLines(columns, width, (at) => ({ x1: at, x2: at, y1: 0, y2: height })),
    ...cutLines(rows, height, (at) => ({ x1: 0, x2: width, y1: at, y2: at }))];
  const label = `cut into ${numberText(rows)} by ${numberText(columns)} pieces, one of them on each device`;
  return svg('svg', { class: 'sheet', width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}`,
    role: 'img', 'aria-label': label },
    svg('rect', { width, height, class: 'sheet-back' }),
    svg('rect', { width: width / Math.min(columns, MOST_LINES), height: height / Math.min(rows, MOST_LINES),
      fill: fillOf(cutsOf(row)) }),
    lines, svg('rect', { width, height, class: 'sheet-edge' }));
}

function sheetSize(down, across, flat) {
  if (flat) return [18, 110];
  const ratio = Math.min(3, Math.max(1 / 3, down / Math.max(across, 1)));
  return ratio >= 1 ? [110, 110 / ratio] : [110 * ratio, 110];
}

/** Lines between pieces; of very many only so many as can be told apart. */
function cutLines(count, length, at) {
  const shown = Math.min(count, MOST_LINES);
  return Array.from({ length: shown - 1 }, (_, i) => svg('line', { ...at(((i + 1) * length) / shown), class: 'cut-line' }));
}
