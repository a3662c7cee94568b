// Light, dark, or as the system has it. The choice is kept in the browser: it is the only thing that is.
import { effect, signal } from "@preact/signals";

const system = matchMedia("(prefers-color-scheme: dark)");
const kept = () => {
  try {
    return localStorage.getItem("skein-theme") || "";
  } catch {
    return ""; // a browser that keeps nothing
  }
};

// theme is light, dark or "" for the system's.
export const theme = signal(kept());
export const dark = signal(false);

const apply = () => {
  dark.value = theme.value ? theme.value === "dark" : system.matches;
  document.documentElement.dataset.theme = dark.value ? "dark" : "light";
};
system.addEventListener("change", apply);
effect(apply);

export function switchTheme() {
  theme.value = dark.value ? "light" : "dark";
  try {
    localStorage.setItem("skein-theme", theme.value);
  } catch {
    // it counts until the page is left
  }
}
