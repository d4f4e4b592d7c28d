// The second map: what a device holds at the worst moment of a step; and the program, with the layouts of what it makes.

function drawStep(section) {
  const { step } = DATA;
  if (!step) return;
  section.hidden = false;
  const inspect = (row) => byId('step-inspector').replaceChildren(...heldDetails(row));
  inspect(step.moment.reduce((best, row) => (row.bytes_per_device > best.bytes_per_device ? row : best)));
  const root = { ...treeOf(step.moment), name: 'the worst moment' };
  new Treemap(byId('step-map'), byId('step-trail'), root, { select: inspect, tip: new Tip(byId('tip')) });
  byId('source').replaceChildren(...step.source.map(sourceTable));
}

/** A row as the map takes it: its place in the tree is its group, its line, and what it is. */
function heldRow(row, index) {
  const parts = [`${row.group}/`, ...(row.place ? [`${row.place} ${row.function}/`] : []), row.array];
  return { ...row, index, parts, path: parts.join(''), arrays: 1, less: false, one: {}, reasons: row.why ? [{ message: row.why }] : [] };
}

function heldDetails(row) {
  const facts = [['of', row.group], ['line', row.place && `${row.place} ${row.function}`], ['pass', row.phase],
    ['lies', row.spec.flat().length ? specText(row.spec) : 'whole on every device'], ['axes from', row.from.join(', ')], ['over', row.over.join(' \u2192 ')],
    ['on a device', bytesText(row.bytes_per_device)]];
  return [
    el('h3', { class: 'path' }, el('bdi', {}, row.array)),
    row.line ? el('pre', {}, row.line) : null,
    el('dl', {}, facts.filter(([, value]) => value).map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)])),
    row.why ? el('ul', { class: 'reasons' }, el('li', {}, row.why)) : null,
  ].filter(Boolean);
}

function sourceTable({ file, lines, more }) {
  const shown = lines.map((line) => el('tr', {}, el('td', { class: 'number' }, `${line.number}`),
    el('td', {}, el('code', {}, line.text)), el('td', { class: 'mono' }, line.makes.map((one) => el('div', {}, one)))));
  const left = more ? el('p', { class: 'note' }, `${counted(more, 'line')} more.`) : null;
  return el('details', { class: 'panel' }, el('summary', {}, el('bdi', {}, file)), el('table', {}, el('tbody', {}, shown)), left);
}
