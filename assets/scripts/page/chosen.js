// What is chosen on the page. The live view compares what it draws with it.

export const chosen = { settings: {}, readers: [], lacking: false, isSetUp: false };
