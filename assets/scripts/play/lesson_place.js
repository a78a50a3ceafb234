// Where a visitor is in the lessons: in the address, and kept in the browser.

const PLACE = "decoding-playground.lesson"; // stored in the browser: the name of a lesson and its step

/** Make the address of the page lead to a lesson, or to none. */
export function nameInAddress(lesson) {
  const address = new URL(location.href);
  if (lesson === null) address.searchParams.delete("lesson");
  else address.searchParams.set("lesson", lesson);
  if (address.href !== location.href) history.replaceState(history.state, "", address);
}

export function keepPlace(lesson, step) {
  try {
    localStorage.setItem(PLACE, JSON.stringify({ lesson, step }));
  } catch (reason) { /* without storage a lesson starts at its first step */ }
}

export function readPlace() {
  try {
    const { lesson, step } = JSON.parse(localStorage.getItem(PLACE)) || {};
    return { lesson, step: Number.isInteger(step) && step >= 0 ? step : 0 };
  } catch (reason) {
    return { lesson: "", step: 0 };
  }
}
