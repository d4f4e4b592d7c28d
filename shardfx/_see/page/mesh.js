// The mesh: a grid of devices for its last two axes, repeated for the others, in a frame for each slice.

function drawMesh(host) {
  const { axes, devices, slices, text } = DATA.mesh;
  const inner = [...AXES.values()].filter((axis) => axis.inner > 1);
  const [rows, columns] = [inner[inner.length - 2], inner[inner.length - 1]];
  const panels = inner.slice(0, -2), count = panels.reduce((product, axis) => product * axis.inner, 1);
  // Few devices are drawn larger.
  const step = count === 1 && slices === 1 ? 20 : 13;
  const width = Math.max(26 + Math.min(columns ? columns.inner : 1, MOST_DOTS) * step, 70) + 20;
  const most = Math.max(1, Math.floor((slices > 1 ? 220 : 480) / width));
  const frames = Array.from({ length: Math.min(slices, 2) }, (_, slice) => el('div', { class: 'slice' },
    slices > 1 ? el('h4', {}, `slice ${slice}`) : null,
    el('div', { class: 'grids' }, Array.from({ length: Math.min(count, most) }, (_, at) =>
      el('figure', {}, panels.length ? el('figcaption', {}, panelName(panels, at)) : null, grid(rows, columns, step))),
      count > most ? el('span', { class: 'and-more' }, `\u2026 ${numberText(count)} of these`) : null)));
  if (slices > 2) frames.push(el('span', { class: 'and-more' }, `\u2026 ${counted(slices, 'slice')}`));
  const label = `${counted(devices, 'device')} in a mesh of ${text}${slices > 1 ? `, in ${counted(slices, 'slice')}` : ''}`;
  host.replaceChildren(el('div', { class: 'slices', role: 'img', 'aria-label': label }, frames), axisTable(axes));
}

function panelName(panels, at) {
  const names = [];
  for (const axis of [...panels].reverse()) {
    names.unshift(el('span', {}, el('b', {}, axis.letters), ` ${at % axis.inner} `));
    at = Math.floor(at / axis.inner);
  }
  return names;
}

const MOST_DOTS = 8;

function grid(rows, columns, step) {
  const across = dots(columns), down = dots(rows), left = rows ? 26 : 4, top = columns ? 22 : 4;
  const width = Math.max(left + across.length * step + 4, 64), height = top + down.length * step + 6;
  const picture = svg('svg', { width, height, 'aria-hidden': 'true' });
  if (columns) picture.append(axisLabel(columns, left, 13, null));
  if (rows) picture.append(axisLabel(rows, -(height - 4), 15, 'rotate(-90)'));
  down.forEach((y, j) => across.forEach((x, i) => {
    const skipped = x === null || y === null, place = { x: left + i * step, y: top + j * step };
    picture.append(skipped
      ? svg('circle', { cx: place.x + step / 2 - 1.5, cy: place.y + step / 2 - 1.5, r: 1.4, class: 'gap' })
      : svg('rect', { ...place, width: step - 3, height: step - 3, rx: 2, class: 'device' }));
  }));
  return picture;
}

/** The devices to draw along an axis; `null` stands for those between. */
function dots(axis) {
  const count = axis ? axis.inner : 1;
  const all = Array.from({ length: Math.min(count, MOST_DOTS) }, (_, at) => at);
  return count > MOST_DOTS ? [...all.slice(0, -2), null, count - 1] : all;
}

function axisLabel(axis, x, y, transform) {
  return svg('text', { x, y, transform, class: 'axis' }, `${axis.letters} ${numberText(axis.inner)}`);
}

function axisTable(axes) {
  const total = DATA.totals.bytes, sliced = DATA.mesh.slices > 1;
  const header = ['axis', 'size', ...(sliced ? ['slices'] : []), 'type', 'cuts'];
  const lines = axes.map((axis) => {
    const cut = sum(DATA.rows.filter((row) => cutsOf(row).includes(axis.name)), (row) => row.bytes);
    const used = axis.size === 1 ? 'nothing: size 1' : cut ? `${shareText(cut, total)} of the bytes` : 'nothing';
    return el('tr', {}, el('th', { scope: 'row' }, axisChip(axis.name)), el('td', { class: 'number' }, numberText(axis.size)),
      sliced ? el('td', { class: 'number' }, numberText(axis.slices)) : null,
      el('td', {}, axis.type), el('td', {}, used));
  });
  return el('table', { class: 'axes' }, el('thead', {}, el('tr', {}, header.map((name) => el('th', { scope: 'col', class: name === 'size' || name === 'slices' ? 'number' : null }, name)))),
    el('tbody', {}, lines));
}
