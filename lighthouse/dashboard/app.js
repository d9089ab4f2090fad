// Joins the parts, and says to the browser's performance timeline when the first picture stood.
import { Confirmation, Notice } from "./actions.js";
import { readAddress } from "./api.js";
import { Drawer } from "./drawer.js";
import { Effective } from "./effective.js";
import { Connection, Header } from "./header.js";
import { html, render, useEffect } from "./html.js";
import { KeyForm } from "./key.js";
import { Log } from "./log.js";
import { start } from "./model.js";
import { Run } from "./run.js";
import { Slider } from "./slider.js";
import { store, useStore } from "./store.js";
import { Timeline, zoomKey } from "./timeline.js";
import { Waterfall } from "./waterfall.js";

function Page() {
  const replay = useStore((s) => s.connection === "replay");
  const name = useStore((s) => s.picture.job.name);
  useEffect(() => {
    document.title = `${name} · lighthouse`;
    requestAnimationFrame(() => setTimeout(() => performance.mark("ft:painted")));
    document.addEventListener("keydown", zoomKey);
    return () => document.removeEventListener("keydown", zoomKey);
  }, [name]);
  return html`
    <${Header} />
    <main>
      <div class="board">
        <${Timeline} />
        <div class="side"><${Effective} /><${Waterfall} /><${Run} /></div>
        <${Log} />
      </div>
    </main>
    ${replay && html`<${Slider} />`}
    <${Drawer} /><${Confirmation} /><${Notice} />
  `;
}

function App() {
  const ready = useStore((s) => s.picture !== null);
  const refused = useStore((s) => s.connection === "refused");
  if (refused) return html`<${KeyForm} />`;
  return ready ? html`<${Page} />` : html`<main class="gate"><${Connection} /></main>`;
}

function addressed() {
  const before = sessionStorage.getItem("ft.key");
  store.set({ event: readAddress() });
  if (sessionStorage.getItem("ft.key") !== before) start();
}

store.set({ event: readAddress() });
addEventListener("hashchange", addressed);
render(html`<${App} />`, document.getElementById("app"));
start();
