// Counts errors of scripts, and what the page's policy refused, where a person and a test can see them.
const pageErrors = [];
function notePageError(text) {
  pageErrors.push(String(text));
  const show = () => {
    document.body.dataset.errors = pageErrors.length;
    document.body.dataset.firstError = pageErrors[0];
  };
  if (document.body) show();
  else document.addEventListener("DOMContentLoaded", show);
}
window.addEventListener("error", (event) => notePageError(event.message));
window.addEventListener("unhandledrejection", (event) => notePageError(event.reason));
document.addEventListener("securitypolicyviolation", (event) => notePageError(`refused: ${event.violatedDirective}`));
