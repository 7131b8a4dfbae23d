"use strict";
// The one thing the page cannot do by itself: show what stands behind a point, next to the pointer.
(() => {
  const tip = document.getElementById("tip");
  const place = (event) => {
    const gap = 14;
    const left = Math.min(event.clientX + gap, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - gap;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above < 8 ? event.clientY + gap : above}px`;
  };
  const show = (event) => {
    const target = event.target instanceof Element ? event.target.closest("[data-tip]") : null;
    tip.hidden = target === null;
    if (target === null) return;
    tip.textContent = target.getAttribute("data-tip");
    place(event);
  };
  document.addEventListener("pointermove", show, { passive: true });
  document.addEventListener("pointerdown", show, { passive: true });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
