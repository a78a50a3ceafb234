// What every page runs before its components. Where several listen to a key, the first one here hears it first.

import "../components/glossary.js";
import "./leaving.js";
import "./shortcuts.js";
import "./themes.js";
import "./drawer.js";
import "./undo.js";
import "./settings.js";
import "./figures.js";
import "./share.js";
import "./opening.js";
