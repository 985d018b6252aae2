// An answer as it grows. Text becomes text nodes and nothing else; what came within a frame is drawn once.

export class AnswerText {
  constructor(box) {
    this.box = box;
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.waiting = "";
    this.frame = 0;
    this.line = null;
  }

  add(text) {
    this.waiting += text;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  // A paragraph for each line: the browser lays out the last one again, not the whole answer.
  draw() {
    this.frame = 0;
    const isAtEnd = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 40;
    const lines = this.waiting.split("\n");
    this.waiting = "";
    lines.forEach((text, index) => {
      if (index > 0 || !this.line) this.line = this.begin();
      if (text) this.line.appendData(text);
    });
    if (isAtEnd) this.box.scrollTop = this.box.scrollHeight;
  }

  begin() {
    const paragraph = document.createElement("p");
    const line = document.createTextNode("");
    paragraph.append(line);
    this.box.append(paragraph);
    return line;
  }
}
