// Asks for the key where the address had none, or a wrong one.
import { forgetViewKey, keepViewKey, viewKey } from "./api.js";
import { html, useState } from "./html.js";
import { start } from "./model.js";
import { store } from "./store.js";

export function KeyForm() {
  const [key, setKey] = useState("");
  const wrong = viewKey() !== "";
  const open = (event) => {
    event.preventDefault();
    forgetViewKey();
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
