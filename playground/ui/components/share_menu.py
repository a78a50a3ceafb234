"""The menu beside Run with what can be given away: a link to the moment that is shown, a frame for another page, a
picture.
Its script is in assets/scripts/page/share.js. The events are 'ask_link' and 'ask_embed'.
"""
from __future__ import annotations

from typing import Any

from playground.ui.components.scripted_component import Scripted

TEMPLATE = """<div class="share-menu">
  <button type="button" class="share-open" aria-haspopup="dialog" aria-expanded="false">Share</button>
  <div class="share-box" role="dialog" aria-label="Share" hidden>
    <button type="button" data-share="link"><b>Copy link</b> <span class="share-moment"></span></button>
    {embed}
    <p class="share-picture" hidden><b>Save a picture</b> <span class="share-view"></span>
      <span class="share-kinds">
        <button type="button" data-share="png" aria-label="Save a picture as PNG">PNG</button>
        <button type="button" data-share="svg" aria-label="Save a picture as SVG">SVG</button>
      </span>
    </p>
  </div>
  <div class="share-by-hand" role="dialog" aria-label="Copy by hand" hidden>
    <label>The browser does not let this page copy. Copy it from here: <textarea readonly rows="3"></textarea></label>
  </div>
  <span class="share-said" role="status"></span>
</div>"""
EMBED = ('<button type="button" data-share="embed"><b>Copy embed code</b> <span>a frame for another page</span>'
         "</button>")
SCRIPT = """
playground.bindShareMenu(element, { link: () => trigger("ask_link"), embed: () => trigger("ask_embed") });
"""


class ShareMenu(Scripted):
    """`embeds`: whether another site may show the page in a frame; elsewhere its code would not work."""

    def __init__(self, embeds: bool, **settings: Any):
        template = TEMPLATE.format(embed=EMBED if embeds else "")
        super().__init__(html_template=template, js_on_load=SCRIPT, apply_default_css=False, **settings)
