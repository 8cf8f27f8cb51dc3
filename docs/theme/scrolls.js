// A box that scrolls sideways is reached by keys, and only as long as it does.
const boxes = new ResizeObserver((seen) => {
  for (const { target } of seen) {
    const box = target.closest(".md-typeset__scrollwrap");
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", "table, scrolls sideways");
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
  }
});
document$.subscribe(() => {
  boxes.disconnect();
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) boxes.observe(box.firstElementChild), boxes.observe(box);
});
