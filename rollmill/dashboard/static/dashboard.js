"use strict";
// Asks for news while somebody looks, replaces the parts of the page that changed, and says how old things are.
(() => {
  const EVERY_MS = 2000;
  const pulse = document.getElementById("pulse");
  let etag = "";
  let failures = 0;

  const age = (seconds) => {
    for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
      if (seconds >= 2 * length) return `${Math.floor(seconds / length)} ${unit}`;
    }
    return `${Math.max(0, Math.floor(seconds))} s`;
  };
  const showAges = () => {
    for (const time of document.querySelectorAll("time[data-since]")) {
      if (!time.title) time.title = time.textContent;
      const text = `${age(Date.now() / 1000 - Number(time.dataset.since))} ago`;
      if (time.textContent !== text) time.textContent = text;
    }
  };
  showAges();
  setInterval(showAges, 1000);
  if (!("live" in document.body.dataset)) return;

  const say = (mood, text) => {
    pulse.firstElementChild.className = `mood ${mood}`;
    pulse.lastElementChild.textContent = text;
  };
  const source = new Map();  // what the server sent of each part: `showAges` changes what the page has
  const show = (text) => {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    for (const part of fresh.querySelectorAll(".part")) {
      const old = document.getElementById(part.id);
      if (old === null || source.get(part.id) === part.innerHTML) continue;
      source.set(part.id, part.innerHTML);
      const opened = [...old.querySelectorAll("details")].map((each) => each.open);
      [...part.querySelectorAll("details")].forEach((each, index) => { each.open = opened[index] ?? false; });
      old.replaceWith(document.adoptNode(part));
    }
    showAges();
  };
  const update = async () => {
    if (document.hidden) return;
    try {
      const reply = await fetch("/live", { headers: etag ? { "If-None-Match": etag } : {}, cache: "no-store" });
      if (reply.status === 200) {
        etag = reply.headers.get("ETag") ?? "";
        show(await reply.text());
      } else if (reply.status !== 304) {
        throw new Error(String(reply.status));
      }
      failures = 0;
      say("live", "up to date");
    } catch (error) {
      failures += 1;
      say("lost", "no answer, trying again");
    }
  };
  const loop = async () => {
    await update();
    setTimeout(loop, EVERY_MS * Math.min(2 ** failures, 15));
  };
  document.addEventListener("visibilitychange", update);
  loop();
})();
