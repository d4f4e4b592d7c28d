// What a device holds, part by part, against what it has.

function drawMemory(host) {
  const here = DATA.memory.filter((part) => !isOfHost(part)), away = DATA.memory.filter(isOfHost);
  const used = sum(here, (part) => part.bytes_per_device), chip = DATA.chip;
  const limit = chip && chip.usable_hbm_bytes_per_device;
  const parts = [verdict(used, chip, limit), bar(here, used, limit), partTable(here, away, limit || used)];
  host.replaceChildren(...parts, ...(DATA.fit ? stepParts(DATA.fit) : []));
}

const HOWS = new Map([
  ['compiled', 'As the compiler says.'], ['foreseen', 'Foreseen from the traced step; its arguments are exact.'],
  ['arguments', 'Of the arguments alone.'],
]);

/** How the numbers were found, and single changes that would save memory, with their code. */
function stepParts(fit) {
  const lines = fit.changes.slice(0, 8).map((change) => el('tr', {},
    el('td', { class: 'number' }, `-${bytesText(change.saves_bytes)}`), el('td', {}, change.fits ? '\u2713 fits' : '\u2717'),
    el('td', {}, change.what, change.how ? el('div', { class: 'mono' }, el('bdi', {}, change.how)) : null)));
  const table = el('table', { class: 'changes' }, el('caption', {}, 'Single changes that save memory'), el('tbody', {}, lines));
  const notes = fit.notes.map((note) => el('p', { class: 'note' }, note));
  const said = el('p', { class: 'note' }, HOWS.get(fit.basis) || '');
  return [said, ...(lines.length ? [table] : []), ...notes];
}

function isOfHost(part) {
  return (part.memory_kind || '').endsWith('host');
}

function verdict(used, chip, limit) {
  if (!chip) return el('p', { class: 'verdict' }, el('b', {}, bytesText(used)), ' of arrays on each device');
  const fits = used <= limit;
  return el('p', { class: `verdict ${fits ? 'good' : 'bad'}` },
    el('b', {}, `${fits ? '\u2713' : '\u2717'} ${bytesText(used)}`),
    ` of ${bytesText(limit)} that a program may use on ${chip.name}`,
    fits ? `: ${shareText(used, limit)}, ${bytesText(limit - used)} are left.`
      : `: ${bytesText(used - limit)} more than there is.`);
}

function bar(parts, used, limit) {
  const most = Math.max(used, limit || 0) * 1.02 || 1, height = 34;
  const picture = svg('svg', { class: 'bar', viewBox: `0 0 1000 ${height}`, preserveAspectRatio: 'none', height, role: 'img',
    'aria-label': `${bytesText(used)} used${limit ? ` of ${bytesText(limit)}` : ''}` });
  if (limit) picture.append(svg('rect', { x: 0, y: 6, width: (1000 * limit) / most, height: height - 12, class: 'room' }));
  let x = 0;
  parts.forEach((part, at) => {
    const width = (1000 * part.bytes_per_device) / most;
    picture.append(svg('rect', { x, y: 6, width: Math.max(width - 2, 0.5), height: height - 12, class: `part part-${at % 6}` },
      svg('title', {}, `${part.group}: ${bytesText(part.bytes_per_device)}`)));
    x += width;
  });
  if (limit) picture.append(svg('rect', { x: (1000 * limit) / most - 2, y: 0, width: 4, height, class: 'limit' }));
  return picture;
}

function partTable(here, away, whole) {
  const line = (part, at) => el('tr', {},
    el('th', { scope: 'row' }, svg('svg', { class: 'swatch', width: 12, height: 12, 'aria-hidden': 'true' },
      svg('rect', { width: 12, height: 12, rx: 3, class: at === null ? 'room' : `part part-${at % 6}` })),
    ' ', el('bdi', {}, shortened(pathText(part.group), 80)), part.memory_kind ? el('span', { class: 'tag' }, part.memory_kind) : null),
    el('td', { class: 'number' }, bytesText(part.bytes_per_device)),
    el('td', { class: 'number' }, at === null ? '' : shareText(part.bytes_per_device, whole)));
  return el('table', { class: 'parts' }, el('tbody', {}, here.map(line), away.map((part) => line(part, null))));
}
