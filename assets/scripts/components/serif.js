// The face of everything a model writes; the page itself speaks in that of the system. It comes with the script, so that a browser keeps it
// and a saved run has it, too. Letters it lacks are of the next face.

import { SERIF } from "python";

const bytesOfFont = Uint8Array.from(atob(SERIF), (letter) => letter.charCodeAt(0));
new FontFace("Source Serif 4", bytesOfFont).load().then((face) => document.fonts.add(face));
