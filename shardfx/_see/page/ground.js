// What all others use: the data, elements whose text is only ever text, sizes in words, and the tree of paths.

const DATA = unpacked(JSON.parse(document.getElementById('data').textContent));
const SVG = 'http://www.w3.org/2000/svg';

function unpacked(data) {
  let path = '';
  data.rows = data.rows.map(([common, rest, arrays, number], index) => {
    path = path.slice(0, common) + rest;
    const kind = data.kinds[number];
    const bytes = kind.bytes * arrays, share = kind.bytes_per_device * arrays;
    return { ...kind, index, path, arrays, one: kind, bytes, bytes_per_device: share };
  });
  if (data.step) data.step.moment = data.step.moment.map(heldRow);
  return data;
}

/** An element with attributes and children; a child that is a string becomes a text node, never HTML. */
function el(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ''));
  return element;
}

function byId(id) {
  return document.getElementById(id);
}

function sum(items, value) {
  return items.reduce((total, item) => total + value(item), 0);
}

/** A path as it is shown; a key may be empty, and a tree may be one array. */
function pathText(path) {
  return path || '(no name)';
}

function bytesText(count) {
  if (count < 1024) return `${count} B`;
  const power = Math.min(Math.floor(Math.log2(count) / 10), 6);
  const scaled = count / 1024 ** power;
  return `${scaled.toLocaleString('en', { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ${'KMGTPE'[power - 1]}iB`;
}

function numberText(count) {
  return count.toLocaleString('en');
}

function counted(count, noun) {
  return `${numberText(count)} ${noun}${count === 1 ? '' : 's'}`;
}

function shareText(part, whole) {
  if (!whole) return '-';
  if (!part) return '0%';
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 0.1 ? '< 0.1%' : `${percent.toFixed(percent < 10 ? 1 : 0)}%`;
}

/** A long text without its middle: what tells paths apart is mostly their end. */
function shortened(text, most, ending = 0.6) {
  const characters = text.length <= most ? [] : [...text];
  if (characters.length <= most) return text;
  const tail = Math.floor((most - 1) * ending);
  return most < 2 ? '' : `${characters.slice(0, most - 1 - tail).join('')}\u2026${characters.slice(-tail).join('')}`;
}

const PEN = document.createElement('canvas').getContext('2d');
PEN.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

function widthOf(text) {
  return PEN.measureText(text).width;
}

/** A text in as many pixels as there are; "" if nothing of use fits. */
function fitted(text, width) {
  let most = Math.min(text.length, Math.floor(width / 2));
  let shown = shortened(text, most, 0.8);
  while (most > 3 && widthOf(shown) > width) {
    most = Math.min(most - 1, Math.ceil((most * width) / widthOf(shown)));
    shown = shortened(text, most, 0.8);
  }
  return widthOf(shown) <= width ? shown : '';
}

const MOST_PARTS = 60;

/** The names of a path, each with the mark that ends it; dots within ranges such as `{0..31}` end nothing. */
function partsOf(path) {
  const parts = path.match(/(?:\{[^{}]*\}|[^/.])*[/.]?/g).filter((part) => part !== '');
  return parts.length <= MOST_PARTS ? parts : [...parts.slice(0, MOST_PARTS - 1), parts.slice(MOST_PARTS - 1).join('')];
}

/** The tree of paths: nodes with `children`, or with the `row` of arrays; chains of single nodes are one. */
function treeOf(rows) {
  const root = { name: 'all arrays', children: new Map(), parent: null };
  for (const row of rows) {
    const parts = row.parts || partsOf(row.path);
    let node = root;
    parts.forEach((part, at) => {
      const key = at === parts.length - 1 ? `${part}\0${row.index}` : part;
      if (!node.children.has(key)) node.children.set(key, { name: part, children: new Map(), row: null });
      node = node.children.get(key);
    });
    if (!parts.length) root.children.set(`\0${row.index}`, (node = { name: pathText(''), children: new Map() }));
    node.row = row;
  }
  const made = settled(root, null);
  return made.row ? { name: 'all arrays', parent: null, children: [made], rows: made.rows, bytes: made.bytes } : made;
}

function settled(node, parent) {
  while (parent && node.children.size === 1) {
    const [only] = node.children.values();
    node = { ...only, name: node.name + only.name };
  }
  const made = { name: node.name, parent, row: node.row || null };
  made.children = [...node.children.values()].map((child) => settled(child, made));
  made.children.forEach((child) => (child.parent = made));
  made.children.sort((a, b) => b.bytes - a.bytes);
  made.rows = made.row ? [made.row] : made.children.flatMap((child) => child.rows);
  made.bytes = sum(made.rows, (row) => row.bytes_per_device);
  return made;
}
