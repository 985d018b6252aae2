// What a tab keeps belongs to one sign-in: it ends with it, on the first page that is of another sign-in or of none.

const MARK = "rubato-sign-in";
const ours = document.querySelector("meta[name=sign-in]")?.content; // a page that says nothing of it leaves all as it is
if (ours && sessionStorage.getItem(MARK) !== ours) {
  sessionStorage.clear();
  sessionStorage.setItem(MARK, ours);
}
