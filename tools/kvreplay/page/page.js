"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const one = document.createElement(tag);
    if (text !== undefined) one.textContent = text;
    if (name) one.className = name;
    return one;
  };
  const ms = (us) => (us / 1000).toFixed(us < 100000 ? 3 : 1) + " ms";
  const KIND = { hit: "good", miss: "", "failed-load": "bad", "lost-load": "bad", "open-load": "warn" };

  // -- head ------------------------------------------------------------------------------------
  $("span").textContent = data.span;
  $("check").textContent = data.check;
  $("check").className = data.check_kind;
  for (const [name, text] of data.numbers) {
    const box = make("div");
    box.append(make("dt", name), make("dd", text));
    $("numbers").append(box);
  }
  for (const [text, kind] of data.logs) $("logs").append(make("p", text, kind));
  if (data.slices_left_out) {
    $("cut").textContent = "up to about " + ms(data.slices_until_us) + "; " + data.slices_left_out +
      " later operations and marks are left out";
  }
  if (data.check_kind === "bad") $("processes").open = true;

  // -- table -----------------------------------------------------------------------------------
  const PAGE = 200;
  let shown = [], limit = PAGE, picked = -1;
  const outcomes = [...new Set(data.requests.map((one) => one.outcome))].sort();
  $("outcome").append(new Option("all outcomes", ""), ...outcomes.map((one) => new Option(one, one)));
  const haystack = data.requests.map((one) =>
    [one.id, one.outcome, one.reason, one.sentence].join(" ").toLowerCase());

  function filter() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const outcome = $("outcome").value;
    shown = [];
    data.requests.forEach((one, index) => {
      if (outcome && one.outcome !== outcome) return;
      if (words.every((word) => haystack[index].includes(word))) shown.push(index);
    });
    limit = PAGE;
    table();
  }

  function table() {
    const rows = shown.slice(0, limit).map((index) => {
      const one = data.requests[index];
      const row = make("tr");
      row.tabIndex = 0;
      row.dataset.index = index;
      row.setAttribute("aria-selected", index === picked);
      row.append(make("td", one.id), make("td", ms(one.at_us), "opt"),
        make("td", one.tokens ?? "", "opt"), make("td", one.outcome, KIND[one.outcome] || ""),
        make("td", one.reason), make("td", one.loaded, "opt"));
      return row;
    });
    $("rows").replaceChildren(...rows);
    $("count").textContent = shown.length + " of " + data.requests.length +
      (data.requests_left_out ? "; " + data.requests_left_out + " later left out" : "");
    $("more").replaceChildren();
    if (shown.length > limit) {
      const more = make("button", "Show more");
      more.onclick = () => { limit += PAGE; table(); };
      $("more").append(more);
    }
  }

  function pick(index, focus) {
    picked = index;
    for (const row of $("rows").children) {
      row.setAttribute("aria-selected", Number(row.dataset.index) === index);
    }
    $("story").hidden = index < 0;
    if (index >= 0) {
      const one = data.requests[index];
      $("name").textContent = one.id;
      $("sentence").textContent = one.sentence;
      $("lines").replaceChildren(...one.lines.map(line));
      if (one.left_out) $("lines").append(make("li", one.left_out + " more lines are left out"));
      history.replaceState(null, "", "#" + encodeURIComponent(one.id));
      if (focus) { $("story").scrollIntoView({ block: "nearest" }); $("name").focus(); }
    } else {
      history.replaceState(null, "", "#");
    }
    draw();
  }

  function line([offset, process, seq, isEvent, text, cause]) {
    const item = make("li", undefined, isEvent ? "" : "then");
    const what = make("span", (isEvent ? "" : "→ ") + text);
    if (isEvent && cause) what.append(make("small", "← " + cause));
    item.append(make("span", isEvent ? "+" + ms(offset) : ""),
      make("span", isEvent ? data.processes[process] + ":" + seq : ""), what);
    return item;
  }

  $("rows").addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) pick(Number(row.dataset.index), true);
  });
  $("rows").addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    if (event.key === "Enter" || event.key === " ") pick(Number(row.dataset.index), true);
    else if (event.key === "ArrowDown") row.nextElementSibling?.focus();
    else if (event.key === "ArrowUp") row.previousElementSibling?.focus();
    else return;
    event.preventDefault();
  });
  $("search").addEventListener("input", filter);
  $("outcome").addEventListener("change", filter);
  $("close").addEventListener("click", () => close());
  function close() {
    const index = picked;
    pick(-1);
    document.querySelector('#rows tr[data-index="' + index + '"]')?.focus();
  }

  // -- timeline --------------------------------------------------------------------------------
  const canvas = $("canvas"), ROW = 18, HEAD = 22;
  // Not by spreading: a list of arguments may not be that long everywhere.
  const most = (list, of) => list.reduce((found, one) => Math.max(found, of(one)), 1);
  const end = Math.max(most(data.slices, (one) => one[1] + one[2]), most(data.marks, (one) => one[1]));
  let from = 0, to = end * 1.02, width = 0, label = 0;
  // Begin with what requests do: an engine may take long to start.
  const busy = data.slices.filter((one) => one[5].length);
  if (busy.length) {
    const first = busy.reduce((found, one) => Math.min(found, one[1]), end);
    const last = most(busy, (one) => one[1] + one[2]);
    const pad = Math.max(10, (last - first) * 0.02);
    from = Math.max(0, first - pad);
    to = last + pad;
  }
  const byTrack = data.tracks.map(() => []);
  data.slices.forEach((one, index) => byTrack[one[0]].push(index));
  const COLOURS = ["#3b82c4", "#d9822b", "#3f9a6b", "#a05fb5", "#b6902a", "#5aa7b8", "#c2566b", "#7a8794"];
  const colour = {};
  data.kinds.forEach((kind, index) => { colour[index] = COLOURS[index % COLOURS.length]; });

  const x = (us) => label + (us - from) / (to - from) * (width - label);
  const us = (pixel) => from + (pixel - label) / (width - label) * (to - from);

  function resize() {
    width = $("scroll").clientWidth;
    label = Math.min(230, Math.round(width * 0.3));
    const ratio = window.devicePixelRatio || 1, height = HEAD + data.tracks.length * ROW;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = height + "px";
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    draw();
  }

  function draw() {
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const front = style.getPropertyValue("--front"), dim = style.getPropertyValue("--dim");
    const rule = style.getPropertyValue("--line"), height = HEAD + data.tracks.length * ROW;
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    const step = 10 ** Math.floor(Math.log10((to - from) / 3));
    const unit = (to - from) / step > 6 ? step * 2 : step;
    // Counted: so far out a number may be too large for the unit to change it.
    for (let at = Math.ceil(from / unit) * unit, left = 20; at < to && left; at += unit, left -= 1) {
      pen.fillStyle = rule;
      pen.fillRect(x(at), 0, 1, height);
      pen.fillStyle = dim;
      pen.fillText((at / 1000).toLocaleString("en") + " ms", x(at) + 4, HEAD / 2);
    }
    data.marks.forEach(([track, at]) => {
      if (at < from || at > to) return;
      pen.fillStyle = dim;
      pen.fillRect(x(at), HEAD + track * ROW + 3, 2, ROW - 6);
    });
    byTrack.forEach((indices, track) => {
      const top = HEAD + track * ROW + 2;
      for (const index of indices) {
        const [, start, length, kind, , requests] = data.slices[index];
        if (start + length < from || start > to) continue;
        const left = Math.max(label, x(start)), right = Math.min(width, x(start + length));
        const mine = picked >= 0 && requests.includes(picked);
        pen.globalAlpha = picked < 0 || mine ? 1 : 0.3;
        pen.fillStyle = colour[kind];
        pen.fillRect(left, top, Math.max(2, right - left), ROW - 4);
        if (mine) { pen.strokeStyle = front; pen.strokeRect(left, top, Math.max(2, right - left), ROW - 4); }
      }
    });
    pen.globalAlpha = 1;
    pen.fillStyle = style.getPropertyValue("--back");
    pen.fillRect(0, 0, label, height);
    data.tracks.forEach(([, name, first], track) => {
      pen.fillStyle = first ? front : dim;
      pen.fillText(fit(pen, first ? name : "   " + name), 4, HEAD + track * ROW + ROW / 2);
      if (first) { pen.fillStyle = rule; pen.fillRect(0, HEAD + track * ROW, width, 1); }
    });
  }

  function fit(pen, text) {
    while (text.length > 4 && pen.measureText(text).width > label - 10) text = text.slice(0, -2) + "…";
    return text;
  }

  function hit(event) {
    const box = canvas.getBoundingClientRect();
    const at = event.clientX - box.left, track = Math.floor((event.clientY - box.top - HEAD) / ROW);
    if (at < label) return -1;
    const slack = (to - from) / (width - label) * 3, moment = us(at);
    return (byTrack[track] || []).findLast((index) => {
      const [, start, length] = data.slices[index];
      return moment >= start - slack && moment <= start + length + slack;
    }) ?? -1;
  }

  function tell(index) {
    const one = data.slices[index];
    if (!one) { $("tip").textContent = ""; return; }
    const names = one[5].map((request) => data.requests[request].id).join(", ");
    $("tip").textContent = ms(one[1]) + ", " + ms(one[2]) + ": " + one[4] + (names ? " (" + names + ")" : "");
  }

  function zoom(factor, around) {
    const middle = around ?? (from + to) / 2;
    const span = Math.min(end * 1.02, Math.max(10, (to - from) * factor));
    move(middle - (middle - from) * span / (to - from), span);
  }
  function move(start, span) {
    from = Math.max(0, Math.min(start, end * 1.02 - span));
    to = from + span;
    draw();
  }
  const ACTS = {
    in: () => zoom(0.5), out: () => zoom(2), all: () => move(0, end * 1.02),
    left: () => move(from - (to - from) / 4, to - from), right: () => move(from + (to - from) / 4, to - from),
  };
  document.querySelectorAll("[data-do]").forEach((one) => { one.onclick = ACTS[one.dataset.do]; });
  const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", a: "all" };
  $("scroll").addEventListener("keydown", (event) => {
    const act = ACTS[KEYS[event.key]];
    if (act) { act(); event.preventDefault(); }
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.altKey) return;
    zoom(event.deltaY > 0 ? 1.25 : 0.8, us(event.offsetX));
    event.preventDefault();
  }, { passive: false });
  const held = new Map();
  let dragged = false, spread = 0;
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event);
    dragged = false;
    spread = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const last = held.get(event.pointerId);
    if (!last) { tell(hit(event)); return; }
    held.set(event.pointerId, event);
    if (held.size === 2) {
      const [one, other] = [...held.values()];
      const now = Math.abs(one.clientX - other.clientX);
      if (spread > 0 && now > 0) zoom(spread / now, us((one.offsetX + other.offsetX) / 2));
      spread = now;
      dragged = true;
    } else if (Math.abs(event.clientX - last.clientX) > 1) {
      dragged = true;
      move(from - (event.clientX - last.clientX) / (width - label) * (to - from), to - from);
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    held.delete(event.pointerId);
    if (dragged) return;
    const index = hit(event);
    tell(index);
    const [request] = index >= 0 ? data.slices[index][5] : [];
    if (request !== undefined) pick(request, true);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));

  // -- everywhere ------------------------------------------------------------------------------
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && picked >= 0) close();
    else if (event.key === "/" && !/INPUT|SELECT/.test(event.target.tagName)) {
      $("search").focus();
      event.preventDefault();
    }
  });
  new ResizeObserver(resize).observe($("scroll"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  filter();
  resize();
  const wanted = decodeURIComponent(location.hash.slice(1));
  const index = data.requests.findIndex((one) => one.id === wanted);
  if (index >= 0) pick(index, true);
})();
