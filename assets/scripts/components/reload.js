// Whether the page was loaded again, by its visitor or by itself after a lost connection.

export const isReload = () => performance.getEntriesByType("navigation")[0]?.type === "reload";
