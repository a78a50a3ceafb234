// What the scripts of a page offer each other: every component's is a script of its own. This is their one name of `window`, where the short
// scripts of Python find it, too.

export const playground = (window.playground ??= {});
