"""Earlier turns of a chat, shown above the prompt. The value is a list of [user, assistant]; hidden if empty."""
from __future__ import annotations

from typing import Any

from playground.ui.components.scripted_component import Scripted

SCRIPT = """
const root = element.querySelector('.turns');

function said(who, text) {
  const line = document.createElement('p');
  line.className = who;
  for (const [part, words] of [['who', who], ['said', text]]) {
    const span = document.createElement('span');
    span.className = part;
    span.textContent = words;
    line.append(span);
  }
  return line;
}

function remover() {
  const button = document.createElement('button');
  button.type = 'button';
  button.textContent = 'Remove earlier turns';
  button.addEventListener('click', () => {
    props.value = [];
    trigger('change', {});
    draw();
  });
  return button;
}

function draw() {
  const turns = Array.isArray(props.value) ? props.value : [];
  root.hidden = !turns.length;
  const lines = turns.flatMap(([user, assistant]) => [said('user', user), said('assistant', assistant)]);
  root.replaceChildren(...lines, ...(turns.length ? [remover()] : []));
}

watch('value', draw);
draw();
"""


class EarlierTurns(Scripted):
    def __init__(self, value: list[list[str]] | None = None, **kwargs: Any):
        super().__init__(
            value or [],
            html_template="<div class='turns' role='group' aria-label='Earlier turns' hidden></div>",
            js_on_load=SCRIPT,
            apply_default_css=False,
            **kwargs,
        )

    def api_info(self) -> dict[str, Any]:
        return {"type": "array"}
