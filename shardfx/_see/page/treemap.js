// The map: nested rectangles whose areas are bytes per device, filled by the mesh axes that cut the arrays.

const HEADER = 18, GAP = 1, LEAST_SIDE = 30, LEAST_AREA = 24, MOST_CELLS = 400, MOST_FRAMES = 3;

class Treemap {
  constructor(host, trail, root, { select, tip }) {
    Object.assign(this, { host, trail, select, tip, stack: [root], matches: null, selected: null });
    host.addEventListener('keydown', (event) => this.onKey(event));
    new ResizeObserver(() => this.resized()).observe(host);
    this.draw();
  }

  get zoom() {
    return this.stack[this.stack.length - 1];
  }

  resized() {
    if (Math.abs(this.host.clientWidth - this.width) > 1) this.draw();
  }

  /** Draws the node that is zoomed into; `focus` is the child that gets the keyboard's focus. */
  draw(focus = null) {
    this.width = Math.max(this.host.clientWidth, 120);
    this.height = Math.round(Math.min(580, Math.max(380, this.width * 0.56)));
    this.tops = new Map();
    this.picture = svg('svg', { width: this.width, height: this.height, viewBox: `0 0 ${this.width} ${this.height}` });
    const children = this.zoom.children.filter((node) => node.bytes > 0);
    if (!children.length) {
      this.host.replaceChildren(el('p', { class: 'note' }, 'No array here has any bytes.'));
      return this.drawTrail();
    }
    const box = { x: 0, y: 0, width: this.width, height: this.height };
    for (const [node, place] of this.placed(this.zoom, children, box)) this.drawTop(node, place);
    this.host.replaceChildren(this.picture);
    this.drawTrail();
    const target = focus && this.tops.get(focus);
    if (target) target.focus();
  }

  drawTop(node, place) {
    const label = this.labelOf(node);
    const group = svg('g', { tabindex: 0, role: 'button', 'aria-label': label, class: 'top' });
    group.addEventListener('click', (event) => this.enter(node, this.rowAt(event.target)));
    group.addEventListener('pointermove', (event) => this.hover(event));
    group.addEventListener('pointerleave', () => this.tip.hide());
    group.addEventListener('focus', () => this.tip.over(group, this.tipOf(node)));
    group.addEventListener('blur', () => this.tip.hide());
    this.drawNode(group, node, place);
    group.append(svg('rect', { ...inset(place, 1.5), class: 'ring' }));
    this.tops.set(node, group);
    this.picture.append(group);
  }

  drawNode(parent, node, place, depth = 1) {
    const roomy = place.width >= LEAST_SIDE * 1.6 && place.height >= LEAST_SIDE + HEADER;
    if (node.row || !roomy) return this.drawCell(parent, node, place);
    const children = depth < MOST_FRAMES ? node.children : leavesBelow(node);
    const frame = svg('g', {});
    frame.append(svg('rect', { ...inset(place, GAP / 2), class: 'frame' }), ...this.headerOf(node, place));
    NODES.set(frame, node);
    const inside = { x: place.x + 2, y: place.y + HEADER, width: place.width - 4, height: place.height - HEADER - 2 };
    for (const [child, at] of this.placed(node, children.filter((one) => one.bytes > 0), inside)) {
      this.drawNode(frame, child, at, depth + 1);
    }
    parent.append(frame);
  }

  drawCell(parent, node, place) {
    const axes = mainCut(node), dimmed = this.matches && !node.rows.some((row) => this.matches.has(row.index));
    const chosen = node.row && this.selected === node.row.index;
    const cell = svg('g', { class: `cell${dimmed ? ' dimmed' : ''}${chosen ? ' chosen' : ''}` });
    cell.append(svg('rect', { ...inset(place, GAP / 2), fill: fillOf(axes) }));
    const lines = labelLines(node, axes, place);
    if (lines.length) cell.append(labelOf(lines, place));
    if (node.rows.some((row) => row.less) && place.width >= 14 && place.height >= 14) cell.append(lessMark(place));
    NODES.set(cell, node);
    parent.append(cell);
  }

  headerOf(node, place) {
    const size = bytesText(node.bytes), both = place.width > widthOf(size) + 60;
    const name = fitted(node.name, place.width - 10 - (both ? widthOf(size) + 10 : 0));
    const clip = svg('svg', { x: place.x, y: place.y, width: place.width, height: HEADER });
    clip.append(svg('text', { x: 5, y: 13, class: 'header' }, name));
    if (both) clip.append(svg('text', { x: place.width - 5, y: 13, class: 'header size' }, size));
    return [clip];
  }

  /** Where each child goes; those that would be too small to see are one. */
  placed(parent, children, box) {
    const total = sum(children, (node) => node.bytes), area = Math.max(box.width * box.height, 1);
    const shown = children.filter((node, at) => at < MOST_CELLS && (node.bytes / total) * area >= LEAST_AREA);
    const rest = children.slice(shown.length);
    const all = rest.length > 1 ? [...shown, ...together(rest, parent)] : children;
    return squarified(all.sort((a, b) => b.bytes - a.bytes), box);
  }

  enter(node, row) {
    if (row) this.select(row);
    if (node.row) return this.mark(node.row);
    this.stack.push(node);
    this.tip.hide();
    this.draw(node.children[0]);
  }

  leave(depth = this.stack.length - 2) {
    if (depth < 0 || depth >= this.stack.length - 1) return;
    const from = this.stack[depth + 1];
    this.stack.length = depth + 1;
    this.tip.hide();
    this.draw(from);
  }

  mark(row) {
    this.selected = row.index;
    this.draw([...this.tops.keys()].find((node) => node.rows.includes(row)));
  }

  /** Dims everything but these rows; `null` dims nothing. */
  filter(matches) {
    this.matches = matches;
    this.draw();
  }

  onKey(event) {
    const tops = [...this.tops.values()], at = tops.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === 'Escape') this.leave();
    else if (at >= 0 && (event.key === 'Enter' || event.key === ' ')) {
      const node = [...this.tops.keys()][at];
      this.enter(node, node.row);
    } else if (at >= 0 && step) tops[(at + step + tops.length) % tops.length].focus();
    else return;
    event.preventDefault();
  }

  rowAt(target) {
    const node = nodeAt(target);
    return node && node.row;
  }

  hover(event) {
    const node = nodeAt(event.target);
    if (node) this.tip.at(event.clientX, event.clientY, this.tipOf(node));
  }

  labelOf(node) {
    const what = node.row ? cutText(cutsOf(node.row)) : counted(sum(node.rows, (row) => row.arrays), 'array');
    const name = shortened(node.name, 120), share = shareText(node.bytes, this.stack[0].bytes);
    return `${name}, ${bytesText(node.bytes)} on each device, ${share} of all, ${what}`;
  }

  tipOf(node) {
    const share = shareText(node.bytes, this.stack[0].bytes);
    const size = `${bytesText(node.bytes)} on each device, ${share} of all`;
    if (!node.row) return [el('b', {}, el('bdi', {}, shortened(node.name, 200))), el('div', {}, size), ...mixture(node)];
    const row = node.row, name = shortened(pathText(row.path), 200);
    const reasons = row.reasons.map((reason) => el('div', { class: 'why' }, shortened(reason.message, 240)));
    return [
      el('b', {}, el('bdi', {}, name)),
      el('div', { class: 'mono' }, `${row.arrays > 1 ? `${numberText(row.arrays)} x ` : ''}${row.array}`),
      el('div', {}, swatch(cutsOf(row)), ' ', el('bdi', { class: 'mono' }, specText(row.spec))),
      el('div', {}, size), ...reasons,
    ];
  }

  drawTrail() {
    const items = this.stack.map((node, depth) => {
      const name = shortened(node.name, 40), last = depth === this.stack.length - 1;
      if (last) return el('li', {}, el('span', { 'aria-current': 'location' }, el('bdi', {}, name)));
      return el('li', {}, el('button', { type: 'button', onclick: () => this.leave(depth) }, el('bdi', {}, name)));
    });
    const size = `${bytesText(this.zoom.bytes)}`;
    this.trail.replaceChildren(el('ol', {}, items), el('span', { class: 'amount' }, size));
  }
}

const NODES = new WeakMap();

function nodeAt(target) {
  for (let at = target; at && at !== document; at = at.parentNode) if (NODES.has(at)) return NODES.get(at);
  return null;
}

/** The arrays below a node, each under its path from there. */
function leavesBelow(node) {
  const leaves = [];
  const visit = (one, name) => {
    if (one.row) leaves.push({ ...one, name });
    else one.children.forEach((child) => visit(child, name + child.name));
  };
  node.children.forEach((child) => visit(child, child.name));
  return leaves.sort((a, b) => b.bytes - a.bytes);
}

/** Nodes too small to be drawn, as one node, or of very many some, each with neighbours in the tree. */
function together(nodes, parent) {
  const many = nodes.length > 2 * MOST_CELLS, length = many ? Math.ceil(nodes.length / 24) : nodes.length;
  const ordered = [...nodes].sort((a, b) => a.rows[0].index - b.rows[0].index), groups = [];
  for (let at = 0; at < ordered.length; at += length) groups.push(ordered.slice(at, at + length));
  return groups.map((group) => {
    const ends = [group[0], group[group.length - 1]].map((node) => shortened(node.name, 30));
    const name = many ? `${ends[0]} to ${ends[1]}` : `${numberText(group.length)} smaller`;
    const children = [...group].sort((a, b) => b.bytes - a.bytes), rows = children.flatMap((node) => node.rows);
    return { name, parent, row: null, children, rows, bytes: sum(children, (node) => node.bytes) };
  });
}

/** The combination of axes that cuts most bytes below a node. */
function mainCut(node) {
  return amounts(node)[0].axes;
}

function amounts(node) {
  const found = new Map();
  for (const row of node.rows) {
    const axes = cutsOf(row), key = keyOf(axes), entry = found.get(key) || { axes, bytes: 0 };
    entry.bytes += row.bytes_per_device;
    found.set(key, entry);
  }
  return [...found.values()].sort((a, b) => b.bytes - a.bytes);
}

function mixture(node) {
  return amounts(node).slice(0, 5).map(({ axes, bytes }) =>
    el('div', {}, swatch(axes), ` ${shareText(bytes, node.bytes)} ${cutText(axes)}`));
}

function inset({ x, y, width, height }, by) {
  return { x: x + by, y: y + by, width: Math.max(width - 2 * by, 0.5), height: Math.max(height - 2 * by, 0.5) };
}

function labelLines(node, axes, { width, height }) {
  const room = width - 14, letters = lettersText(axes) || 'whole';
  const fits = (text) => widthOf(text) <= room;
  if (height < 18) return [];
  if (height < 24 || room < 44) return fits(letters) ? [letters] : [];
  const second = [`${letters}  ${bytesText(node.bytes)}`, letters].find(fits);
  return [fitted(node.name, room), ...(height >= 42 && second ? [second] : [])].filter(Boolean);
}

/** A corner that marks what got less than was asked for. */
function lessMark({ x, y, width }) {
  return svg('path', { d: `M${x + width - 13} ${y + 1} h12 v12 z`, class: 'less-mark' });
}

function labelOf(lines, { x, y, width, height }) {
  const longest = Math.max(...lines.map(widthOf));
  const clip = svg('svg', { x: x + 3, y: y + 3, width: Math.max(width - 6, 0), height: Math.max(height - 6, 0) });
  clip.append(svg('rect', { width: longest + 8, height: lines.length * 14 + 3, rx: 3, class: 'label-back' }));
  lines.forEach((line, at) => clip.append(svg('text', { x: 4, y: 12 + 14 * at, class: at ? 'label fine' : 'label' }, line)));
  return clip;
}

/** Places for nodes, largest first, in rows whose rectangles are as square as can be (Bruls, Huizing, van Wijk). */
function squarified(nodes, box) {
  const placed = [], total = sum(nodes, (node) => node.bytes);
  let { x, y, width, height } = box, left = nodes, scale = (width * height) / total;
  while (left.length) {
    const side = Math.min(width, height);
    let count = 1;
    while (count < left.length && worst(left, count + 1, side, scale) <= worst(left, count, side, scale)) count++;
    const line = left.slice(0, count), area = sum(line, (node) => node.bytes) * scale, thick = side ? area / side : 0;
    let along = 0;
    for (const node of line) {
      const length = thick ? (node.bytes * scale) / thick : 0;
      placed.push([node, width >= height
        ? { x, y: y + along, width: thick, height: length } : { x: x + along, y, width: length, height: thick }]);
      along += length;
    }
    if (width >= height) [x, width] = [x + thick, Math.max(width - thick, 0)];
    else [y, height] = [y + thick, Math.max(height - thick, 0)];
    left = left.slice(count);
  }
  return placed;
}

function worst(nodes, count, side, scale) {
  let area = 0, least = Infinity, most = 0;
  for (let at = 0; at < count; at++) {
    const one = nodes[at].bytes * scale;
    area += one;
    least = Math.min(least, one);
    most = Math.max(most, one);
  }
  return Math.max((side * side * most) / (area * area), (area * area) / (side * side * least));
}
