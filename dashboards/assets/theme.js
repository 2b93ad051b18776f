// Which theme the page has, told to the server, so that figures follow it: at the start, after the
// switch, and when the system changes between day and night.
window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.diag = {
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
};
