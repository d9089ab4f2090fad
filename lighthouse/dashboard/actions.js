// Orders of an operator: the token, a reason, and a confirmation that says what will happen.
import { adminToken, forgetAdminToken, keepAdminToken, post } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { refresh } from "./model.js";
import { store, useStore } from "./store.js";

const ACTIONS = {
  evict: {
    title: (r) => `Evict replica ${r}?`,
    effect: (r) => `The processes of replica ${r} are ended now, the others go on in a new epoch without it, and its supervisor starts it again.`,
  },
  drain: {
    title: (r) => `Drain replica ${r}?`,
    effect: (r) => `Replica ${r} leaves after its present step and stays out until it is undrained. Nothing is lost; the others go on in a new epoch.`,
  },
  undrain: {
    title: (r) => `Let replica ${r} in again?`,
    effect: (r) => `Replica ${r} may join again: it fetches the state and contributes from the next epoch on.`,
  },
  "drain-host": {
    title: (h) => `Drain ${h}?`,
    effect: (h) => `A replica with ranks on ${h} leaves after its present step and goes on with a spare machine; no step is repeated. ${h} gets no ranks until it is undrained.`,
  },
  "undrain-host": {
    title: (h) => `Let ${h} have ranks again?`,
    effect: (h) => `${h} is spare, or takes a place that is free.`,
  },
  checkpoint: {
    title: () => "Write a checkpoint now?",
    effect: () => "The replicas write a checkpoint of the next step that they commit. Training goes on meanwhile.",
  },
};

export function Confirmation() {
  const asked = useStore((s) => s.asked);
  return asked && html`<${Dialog} key=${asked.action + (asked.host ?? asked.replica)} asked=${asked} />`;
}

function Dialog({ asked }) {
  const { action, replica, host } = asked;
  const order = ACTIONS[host ? `${action}-host` : action];
  const what = host ?? replica;
  const whose = host ? `hosts/${encodeURIComponent(host)}/` : action === "checkpoint" ? "" : `replicas/${replica}/`;
  const dialog = useRef(null);
  const [token, setToken] = useState(adminToken());
  const [known, setKnown] = useState(adminToken() !== "");
  const [reason, setReason] = useState("");
  const [error, setError] = useState("");
  const [sending, setSending] = useState(false);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.isConnected && before.focus();
  }, []);
  const close = () => store.set({ asked: null });
  const send = async (event) => {
    event.preventDefault();
    setSending(true);
    setError("");
    keepAdminToken(token);
    try {
      const { detail } = await post(`/v1/admin/${whose}${action}`, { reason: reason.trim() });
      store.set({ asked: null, notice: { text: detail, good: true } });
      refresh();
    } catch (failure) {
      if (failure.status === 401 || failure.status === 403) {
        forgetAdminToken();
        setKnown(false);
        setToken("");
      }
      setError(failure.status ? failure.message : "the lighthouse does not answer; nothing is known to have happened");
      setSending(false);
    }
  };
  return html`
    <dialog ref=${dialog} class="confirm" aria-labelledby="confirm" onCancel=${close} onKeyDown=${(e) => e.stopPropagation()}>
      <form onSubmit=${send}>
        <h2 id="confirm">${order.title(what)}</h2>
        <p>${order.effect(what)}</p>
        ${!known && html`<label>Admin token<input type="password" autocomplete="off" required value=${token} onInput=${(e) => setToken(e.target.value)} /><small class="quiet">RUN/admin_token; kept in this tab only</small></label>`}
        <label>Reason, for the journal<input type="text" required maxlength="200" value=${reason} onInput=${(e) => setReason(e.target.value)} /></label>
        ${error && html`<p class="notice bad" role="alert">${error}</p>`}
        <footer>
          <button type="button" onClick=${close}>cancel</button>
          <button type="submit" class=${action === "evict" ? "danger solid" : "solid"} disabled=${sending}>${action === "checkpoint" ? "write checkpoint" : host ? `${action} ${host}` : `${action} replica ${replica}`}</button>
        </footer>
      </form>
    </dialog>
  `;
}

/** What an action came to, where no drawer shows it. */
export function Notice() {
  const notice = useStore((s) => s.notice);
  const drawer = useStore((s) => s.replica !== null);
  useEffect(() => {
    if (!notice) return undefined;
    const timer = setTimeout(() => store.set({ notice: null }), 10_000);
    return () => clearTimeout(timer);
  }, [notice]);
  return notice && !drawer && html`<p class=${`toast notice ${notice.good ? "" : "bad"}`} role="status">${notice.text}</p>`;
}
