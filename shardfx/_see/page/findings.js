// What a check of the plan found, worst first as it was given; the fix is code to copy.

const SEVERITIES = new Map([
  ['error', ['\u2716', 'bad']], ['warning', ['\u25b2', 'warn']], ['info', ['\u25cf', 'calm']],
]);

function drawFindings(section, find) {
  const findings = DATA.findings;
  if (!findings.length) return;
  section.hidden = false;
  const more = DATA.more_findings ? el('p', { class: 'note' }, `${counted(DATA.more_findings, 'finding')} more.`) : null;
  const list = el('ul', { class: 'findings' }, findings.map((finding) => findingItem(finding, find)));
  section.lastElementChild.replaceChildren(list, ...(more ? [more] : []));
}

function findingItem(finding, find) {
  const [mark, style] = SEVERITIES.get(finding.severity) || SEVERITIES.get('info');
  return el('li', { class: `panel finding ${style}` },
    el('div', { class: 'headline' }, el('span', { class: 'severity' }, el('span', { 'aria-hidden': 'true' }, mark), ` ${finding.severity}`),
      el('span', { class: 'tag' }, finding.code),
      el('button', { type: 'button', class: 'link mono', title: 'Find it in the table', onclick: () => find(finding.where) },
        el('bdi', {}, shortened(finding.where, 160))),
      finding.bytes ? el('span', { class: 'amount' }, bytesText(finding.bytes)) : null),
    el('p', {}, finding.message),
    finding.fix ? el('pre', { tabindex: 0, 'aria-label': 'the fix, as code' }, el('code', {}, finding.fix)) : null);
}
