"""What pages and their charts hold."""

from html.parser import HTMLParser
from pathlib import Path

from matplotlib.figure import Figure


class Page(HTMLParser):
    """Tags, references and text of a page that is well formed."""

    VOID = frozenset(("meta", "link", "img", "br"))

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags, self.references, self.open, self.texts = [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    @property
    def text(self) -> str:
        """All of it, with single spaces."""
        return " ".join("".join(self.texts).split())

    def check_alone(self) -> None:
        """Check that it has no scripts and loads nothing."""
        assert "script" not in self.tags
        assert all(reference.startswith(("data:", "#")) for reference in self.references)
        assert not any(text in self.source for text in ("http://", "https://", "@import"))
        assert self.source.count("url(") == self.source.count("url(#")

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def drawn(chart):
    """The axes of a chart; the first, where it has several."""
    figure = Figure()
    chart.draw(figure, **chart.data)
    return figure.axes[0]
