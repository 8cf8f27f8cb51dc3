// A table that scrolls sideways is reached by keys, as long as it does.
const sizes = new ResizeObserver((seen) => {
  for (const box of new Set(seen.map(({ target }) => target.closest(".md-typeset__scrollwrap")))) {
    const scrolls = box.scrollWidth > box.clientWidth;
    const number = 1 + [...document.querySelectorAll(".md-typeset__scrollwrap")].indexOf(box);
    const told = { tabindex: 0, role: "region", "aria-label": `table ${number} of this page, scrolls sideways` };
    for (const [name, value] of Object.entries(told)) {
      if (scrolls) box.setAttribute(name, value);
      else box.removeAttribute(name);
    }
  }
});
document$.subscribe(() => {
  sizes.disconnect();
  for (const one of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset__table")) sizes.observe(one);
});

// The theme puts each copy button into a landmark of its own, and all have one name.
const unmark = () => {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
};
const buttons = new MutationObserver(unmark);
document$.subscribe(() => {
  unmark();
  buttons.observe(document.querySelector("article"), { childList: true, subtree: true });
});
