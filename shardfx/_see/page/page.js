// Puts the parts together: the numbers at the top, the map with its inspector, and the search that they share.

class Tip {
  constructor(element) {
    this.element = element;
  }

  at(x, y, content) {
    const { element } = this;
    element.replaceChildren(...content);
    element.hidden = false;
    const { width, height } = element.getBoundingClientRect();
    // Beside the map are the details of the chosen array, which it must not cover.
    const edge = Math.min(innerWidth, byId('treemap').getBoundingClientRect().right);
    const left = Math.min(x + 14, edge - width - 8), above = y + 18 + height > innerHeight;
    element.style.left = `${Math.max(left, 8)}px`;
    element.style.top = `${Math.max(above ? y - height - 12 : y + 18, 8)}px`;
  }

  over(target, content) {
    if (!target.matches(':focus-visible')) return;
    const box = target.getBoundingClientRect();
    this.at(box.left, Math.min(box.bottom - 12, innerHeight - 40), content);
  }

  hide() {
    this.element.hidden = true;
  }
}

/** The numbers; a number of arrays that can be shown alone is a button: `choose` gets the name of the filter. */
function drawTiles(host, choose) {
  const { arrays, bytes, bytes_per_device: share, even_bytes_per_device: even, replicated_bytes: whole,
    corrected_arrays: corrected } = DATA.totals;
  const tiles = [
    [numberText(arrays), arrays === 1 ? 'array' : 'arrays', bytesText(bytes)],
    [numberText(DATA.mesh.devices), DATA.mesh.devices === 1 ? 'device' : 'devices', DATA.mesh.text],
    [bytesText(share), 'per device', even ? `${(share / even).toFixed(2)} x an even split` : ''],
    [bytesText(whole), 'whole on every device', share ? `${shareText(whole, share)} of what it holds` : '', whole && WHOLE],
    [numberText(corrected), corrected === 1 ? 'array got less' : 'arrays got less', 'than the rules asked for', corrected && LESS],
  ];
  host.append(...tiles.map(([number, name, more, filter]) => {
    const parts = [el('b', {}, number), el('span', {}, name), el('small', {}, el('bdi', {}, more))];
    return el('li', {}, filter ? el('button', { type: 'button', title: 'Show these alone', onclick: () => choose(filter) }, parts) : parts);
  }));
}

function drawLegend(host) {
  const bytes = new Map();
  for (const row of DATA.rows) {
    const key = keyOf(cutsOf(row));
    bytes.set(key, (bytes.get(key) || 0) + row.bytes_per_device);
  }
  const used = [...bytes].filter(([, count]) => count).sort((a, b) => b[1] - a[1]).slice(0, 12);
  host.append(...used.map(([key]) => {
    const axes = FILLS.get(key).axes;
    return el('li', {}, swatch(axes), axes.length ? el('b', {}, lettersText(axes)) : null,
      el('bdi', {}, axes.length ? axes.join(' x ') : 'whole on every device'));
  }));
  if (!DATA.rows.some((row) => row.less)) return;
  const corner = svg('svg', { class: 'swatch', width: 18, height: 18, 'aria-hidden': 'true' }, lessMark({ x: 3, y: 2, width: 14 }));
  host.append(el('li', {}, corner, 'got less than was asked'));
}

function inspect(row) {
  const hint = el('p', { class: 'hint' }, 'Choose an array in the map to see how it is cut, and why.');
  byId('inspector').replaceChildren(...(row ? detailsOf(row) : [hint]));
}

function start() {
  addEventListener('scroll', () => (byId('tip').hidden = true), { passive: true });
  document.body.append(svg('svg', { width: 0, height: 0, class: 'hidden', 'aria-hidden': 'true' }, fillDefinitions()));
  drawLegend(byId('legend'));
  drawMesh(byId('mesh').lastElementChild);
  drawMemory(byId('memory').lastElementChild);
  const largest = DATA.rows.reduce((best, row) => (!best || row.bytes_per_device > best.bytes_per_device ? row : best), null);
  inspect(largest);
  const map = new Treemap(byId('treemap'), byId('trail'), treeOf(DATA.rows), { select: inspect, tip: new Tip(byId('tip')) });
  const table = new Table(byId('table'), byId('more'), byId('count'));
  const search = byId('search'), choice = byId('filter'), choices = filters();
  choice.append(...choices.map(([name], at) => el('option', { value: at }, name)));
  const refresh = () => {
    const rows = searched(DATA.rows.filter(choices[choice.value][1]), search.value);
    table.show(rows);
    map.filter(rows.length === DATA.rows.length ? null : new Set(rows.map((row) => row.index)));
  };
  search.addEventListener('input', refresh);
  choice.addEventListener('change', refresh);
  byId('filters').addEventListener('submit', (event) => event.preventDefault());
  drawTiles(byId('tiles'), (name) => {
    const at = choices.findIndex(([other]) => other === name);
    choice.value = Number(choice.value) === at ? 0 : at;
    search.value = '';
    refresh();
    byId('map').scrollIntoView({ block: 'nearest' });
  });
  drawFindings(byId('findings'), (where) => {
    search.value = where;
    choice.value = 0;
    refresh();
    byId('arrays').scrollIntoView();
    search.focus({ preventScroll: true });
  });
  drawTraffic(byId('traffic'));
  drawStep(byId('step'));
  const more = DATA.more;
  if (more.rows) {
    byId('left-out').hidden = false;
    byId('left-out').textContent = `This page shows the ${counted(DATA.rows.length, 'row')} with the most bytes. Left out: `
      + `${counted(more.arrays, 'array')} in ${counted(more.rows, 'row')}, ${bytesText(more.bytes_per_device)} per device.`;
  }
}

start();
