// Settings, versions and machines: names and what they stand for, in groups that open.
"use strict";

views.facts = (figure, view) => {
  for (const [name, facts] of Object.entries(view.groups)) {
    const list = make("dl");
    for (const [key, value] of Object.entries(facts))
      list.append(make("div", {}, make("dt", {}, key), make("dd", {}, value)));
    figure.append(make("details", {}, make("summary", {}, name), list));
  }
};
