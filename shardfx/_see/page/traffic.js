// What a step sends: sums by axis and kind as bars, then a row for each collective.

function drawTraffic(section) {
  const traffic = DATA.traffic;
  if (!traffic) return;
  section.hidden = false;
  const dcn = traffic.dcn_bytes ? `, ${bytesText(traffic.dcn_bytes)} of them between slices` : '';
  const total = `${bytesText(traffic.wire_bytes)} enter each of ${counted(traffic.devices, 'device')} in a step${dcn}.`;
  const more = traffic.more ? el('p', { class: 'note' }, `${counted(traffic.more, 'row')} more.`) : null;
  const axesOf = (row) => (row.axes.length ? row.axes.join(' x ') : 'no axis known');
  section.lastElementChild.replaceChildren(...[
    el('p', {}, total),
    el('div', { class: 'columns even' }, bars('by mesh axis', traffic, axesOf), bars('by kind', traffic, (row) => row.kind)),
    traffic.rows.length ? el('div', { class: 'panel flush' }, trafficTable(traffic.rows)) : null, more].filter(Boolean));
}

function bars(title, traffic, key) {
  const sums = new Map();
  for (const row of traffic.rows) sums.set(key(row), (sums.get(key(row)) || 0) + row.wire_bytes);
  const lines = [...sums].sort((a, b) => b[1] - a[1]).slice(0, 8), most = lines.length ? lines[0][1] : 1;
  return el('div', { class: 'panel' }, el('h3', {}, title), el('table', { class: 'bars' }, el('tbody', {},
    lines.map(([name, bytes]) => el('tr', {}, el('th', { scope: 'row' }, el('bdi', {}, name)),
      el('td', {}, svg('svg', { class: 'stretch', viewBox: '0 0 100 10', preserveAspectRatio: 'none', height: 12, 'aria-hidden': 'true' },
        svg('rect', { width: (100 * bytes) / (most || 1), height: 10, class: 'meter-bar' }))),
      el('td', { class: 'number' }, `${bytesText(bytes)}, ${shareText(bytes, traffic.wire_bytes)}`))))));
}

function trafficTable(rows) {
  const names = ['bytes/step', 'kind', 'axes', 'calls', 'leaf', 'source'];
  const lines = rows.slice(0, 400).map((row) => {
    const file = row.source && row.source.replaceAll('\\', '/').split('/').pop();
    const cells = [bytesText(row.wire_bytes), row.kind + (row.windowed ? ' (windowed)' : ''), row.axes.join(' x ') || '-',
      row.calls === null ? '?' : numberText(row.calls), shortened(row.leaf || '-', 120), row.source ? `${file} ${row.function || ''}` : '-'];
    return el('tr', { title: row.note || null }, cells.map((text, at) => el('td', {
      class: at === 0 || at === 3 ? 'number' : at > 3 ? 'mono' : null, 'data-name': names[at], title: at === 5 ? row.source : null,
    }, el('bdi', {}, text))));
  });
  return el('table', { class: 'list' }, el('thead', {}, el('tr', {}, names.map((name, at) =>
    el('th', { scope: 'col', class: at === 0 || at === 3 ? 'number' : null }, name)))), el('tbody', {}, lines));
}
