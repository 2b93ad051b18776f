// The two things that only the browser knows: its theme, and what the reader did to a plot.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.diag = {
  // The theme of the page: at the start, after the switch, and when the system changes between day
  // and night.
  watch: function () {
    const root = document.documentElement;
    const name = "data-mantine-color-scheme";
    const scheme = () => (root.getAttribute(name) === "dark" ? "dark" : "light");
    if (!window.diagWatches) {
      window.diagWatches = new MutationObserver(() =>
        window.dash_clientside.set_props("theme", { data: scheme() }),
      );
      window.diagWatches.observe(root, { attributes: true, attributeFilter: [name] });
    }
    return scheme();
  },

  // A fresh figure from the server, with the zoom and the hidden lines of the one on show, as long
  // as both show the same selection. Plotly's uirevision alone does not do it: the graph component
  // writes the reader's zoom into the figure, where plotly takes it for the program's own.
  keep: function (fresh, shown) {
    if (!fresh) {
      return { data: [], layout: {} };
    }
    const now = fresh.layout || {};
    const old = (shown && shown.layout) || {};
    if (!now.meta || !old.meta || now.meta.keep !== old.meta.keep) {
      return fresh;
    }
    const layout = Object.assign({}, now);
    for (const name of ["xaxis", "yaxis"]) {
      const axis = old[name] || {};
      const home = old.meta.home[name];
      const same = home && axis.range && home.every((end, i) => end === axis.range[i]);
      if (axis.range && axis.autorange !== true && !same) {
        layout[name] = Object.assign({}, now[name], {
          range: axis.range.slice(),
          autorange: false,
        });
      }
    }
    const seen = new Map((shown.data || []).map((trace) => [trace.name, trace.visible]));
    const data = (fresh.data || []).map((trace) =>
      trace.name && seen.has(trace.name)
        ? Object.assign({}, trace, { visible: seen.get(trace.name) })
        : trace,
    );
    return Object.assign({}, fresh, { data: data, layout: layout });
  },
};
