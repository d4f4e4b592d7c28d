// How a mesh axis looks, wherever it is shown: a colour that the colour-blind can tell apart, letters, and a texture.

// Okabe and Ito's palette, in an order in which neighbours differ most; more axes take it again with a texture.
const COLOURS = ['#0072b2', '#e69f00', '#009e73', '#cc79a7', '#56b4e9', '#d55e00', '#f0e442'];
const TEXTURES = ['', 'dots', 'lines'];
// The usual names have the same colour on every page.
const USUAL = new Map([['data', 0], ['fsdp', 1], ['tensor', 2], ['model', 2], ['expert', 3], ['sequence', 4], ['context', 4],
  ['pipeline', 5], ['stage', 5], ['replica', 6]]);
const AXES = new Map();

/** The number of each axis's colour; `tensor_0`, a part of `tensor`, has that of the whole. */
function colourNumbers(names) {
  const usual = names.map((name) => USUAL.get(name.replace(/_\d+$/, '')));
  const free = COLOURS.map((_, at) => at).filter((at) => !usual.includes(at));
  let next = 0;
  return usual.map((number) => number ?? (free.length ? free[next++ % free.length] : next++ % COLOURS.length));
}

const NUMBERS = colourNumbers(DATA.mesh.axes.map((axis) => axis.name));

DATA.mesh.axes.forEach((axis, at) => {
  const before = NUMBERS.slice(0, at).filter((number) => number === NUMBERS[at]).length;
  AXES.set(axis.name, {
    ...axis,
    colour: COLOURS[NUMBERS[at]],
    texture: TEXTURES[before % TEXTURES.length],
    letters: lettersOf(axis.name, at),
    inner: axis.size / axis.slices,
  });
});

/** The shortest of some abbreviations that no axis before it has. */
function lettersOf(name, at) {
  const words = name.split(/[^\p{L}\p{N}]+/u).filter(Boolean);
  const tries = [name.slice(0, 1), words.map((word) => word[0]).join('').slice(0, 3), name.slice(0, 2)];
  const taken = new Set([...AXES.values()].map((axis) => axis.letters));
  const free = tries.map((text) => text.toUpperCase()).find((text) => /^[\p{L}\p{N}]+$/u.test(text) && !taken.has(text));
  return free || `${at + 1}`;
}

/** The axes that cut an array, in the mesh's order; axes of size 1 cut nothing. */
function cutsOf(row) {
  row.one.cuts ??= [...AXES.keys()].filter((name) => AXES.get(name).size > 1 && row.spec.some((axes) => (axes || []).includes(name)));
  return row.one.cuts;
}

function keyOf(axes) {
  return axes.length ? axes.join('\0') : '';
}

function lettersText(axes) {
  return axes.map((name) => AXES.get(name).letters).join('\u00b7');
}

/** The textures and bands that cells are filled with, for every combination of axes that occurs. */
const FILLS = new Map();

function fillOf(axes) {
  return FILLS.get(keyOf(axes)).fill;
}

function fillDefinitions() {
  const definitions = svg('defs');
  const combinations = new Map([['', []]]);
  for (const name of AXES.keys()) combinations.set(name, [name]);
  for (const row of [...DATA.rows, ...(DATA.step ? DATA.step.moment : [])]) combinations.set(keyOf(cutsOf(row)), cutsOf(row));
  let number = 0;
  for (const [key, axes] of combinations) {
    const id = `fill-${number++}`;
    definitions.append(axes.length ? bands(id, axes) : hatched(id));
    FILLS.set(key, { axes, fill: `url(#${id})` });
  }
  return definitions;
}

/** A tint of the axis that cuts into most pieces, with a thin line in the colour of each other. */
function bands(id, axes) {
  const [first, ...others] = [...axes].sort((a, b) => AXES.get(b).size - AXES.get(a).size);
  const size = 12 + 5 * Math.max(others.length, 1), turned = others.length ? 'rotate(45)' : null;
  const pattern = svg('pattern', { id, width: size, height: size, patternUnits: 'userSpaceOnUse', patternTransform: turned });
  pattern.append(svg('rect', { width: size, height: size, class: 'cell-back' }),
    svg('rect', { width: size, height: size, fill: AXES.get(first).colour, class: 'tint' }), ...textured(first, 0, size));
  others.forEach((name, at) => {
    const x = 12 + 5 * at;
    pattern.append(svg('rect', { x, width: 3, height: size, fill: AXES.get(name).colour, class: 'stripe' }), ...textured(name, x, size));
  });
  return pattern;
}

function textured(name, x, size) {
  const { texture } = AXES.get(name);
  if (texture === 'dots') return [svg('circle', { cx: x + 1.5, cy: size / 2, r: 1.5, class: 'texture' })];
  return texture === 'lines' ? [svg('rect', { x, y: size / 2, width: 3, height: 1.5, class: 'texture' })] : [];
}

function hatched(id) {
  return svg('pattern', { id, width: 7, height: 7, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(-45)' },
    svg('rect', { width: 7, height: 7, class: 'whole-back' }), svg('rect', { width: 1.6, height: 7, class: 'whole-line' }));
}

/** A small square filled like the cells of these axes. */
function swatch(axes) {
  return svg('svg', { class: 'swatch', width: 18, height: 18, 'aria-hidden': 'true' },
    svg('rect', { width: 18, height: 18, rx: 4, fill: fillOf(axes) }));
}

/** The name of an axis with its swatch. */
function axisChip(name) {
  return el('span', { class: 'chip' }, swatch([name]), el('b', {}, AXES.get(name).letters), ' ', el('bdi', {}, name));
}

/** A spec as it is written in rules: `fsdp,tensor`, with "-" where a dimension is whole, "+" between axes. */
function specText(spec) {
  const entries = spec.map((axes) => (axes === null ? 'any' : axes.join('+') || '-'));
  while (entries.length && entries[entries.length - 1] === '-') entries.pop();
  return entries.join(',') || '-';
}

function cutText(axes) {
  return axes.length ? `cut by ${axes.join(', ')}` : 'whole on every device';
}
