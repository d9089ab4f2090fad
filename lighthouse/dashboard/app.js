// Joins the parts, and says to the browser's performance timeline when the first overview stood.
import { Confirmation, Notice } from "./actions.js";
import { keepViewKey, readAddress, viewKey } from "./api.js";
import { Diagnosis } from "./diagnosis.js";
import { Drawer } from "./drawer.js";
import { Connection, Header } from "./header.js";
import { html, render, useEffect, useState } from "./html.js";
import { Log } from "./log.js";
import { start } from "./model.js";
import { Effective, Hosts, Run } from "./side.js";
import { Slider } from "./slider.js";
import { store, useStore } from "./store.js";
import { Timeline, zoomKey } from "./timeline.js";
import { Waterfall } from "./waterfall.js";

function Page() {
  const replay = useStore((s) => s.connection === "replay");
  const name = useStore((s) => s.overview.job.name);
  useEffect(() => {
    document.title = `${name} · lighthouse`;
    requestAnimationFrame(() => setTimeout(() => performance.mark("ft:painted")));
    document.addEventListener("keydown", zoomKey);
    return () => document.removeEventListener("keydown", zoomKey);
  }, [name]);
  return html`
    <${Header} />
    <main>
      <${Diagnosis} />
      <div class="board">
        <${Timeline} />
        <div class="side"><${Effective} /><${Waterfall} /><${Hosts} /><${Run} /></div>
        <${Log} />
      </div>
    </main>
    ${replay && html`<${Slider} />`}
    <${Drawer} /><${Confirmation} /><${Notice} />
  `;
}

/** Asks for the key where the address had none, or a wrong one. */
function KeyForm() {
  const [key, setKey] = useState("");
  const wrong = viewKey() !== "";
  const open = (event) => {
    event.preventDefault();
    keepViewKey(key);
    store.set({ connection: "connecting" });
    start();
  };
  return html`
    <main class="gate">
      <form onSubmit=${open}>
        <h1>lighthouse</h1>
        <label>View key<input type="password" autocomplete="off" autofocus required value=${key} onInput=${(e) => setKey(e.target.value)} /></label>
        <p class=${wrong ? "notice bad" : "quiet"} role="status">${wrong ? "That key was refused." : "It ends the link that the launcher prints: #key=…"}</p>
        <button type="submit" class="solid">open</button>
      </form>
    </main>
  `;
}

function App() {
  const ready = useStore((s) => s.overview !== null);
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
