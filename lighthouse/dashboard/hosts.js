// The machines whose agents run what the lighthouse places on them: those that need a look first.
import { html } from "./html.js";
import { store, useStore } from "./store.js";

const ABOUT = {
  silent: "its agent is not heard",
  leaving: "its ranks leave after the present step",
  cordoned: "it gets no ranks until an operator lets it have some",
  waiting: "its replica lacks another machine",
  used: "ranks run there",
  spare: "it takes the place of a machine that is lost, or leaves",
};
const ORDER = Object.keys(ABOUT);
const NONE = [];

const ranksOf = (ranks) => (ranks.length > 1 ? `${ranks[0]}–${ranks.at(-1)}` : ranks[0]);
const first = ({ host }) => host.split(".")[0];

export function Hosts() {
  const hosts = useStore((s) => s.overview.hosts ?? NONE);
  const live = useStore((s) => s.overview.job.live);
  const counts = ORDER.map((state) => [hosts.filter((h) => h.state === state).length, state]).filter(([n]) => n);
  const place = (h) => ORDER.indexOf(h.state) * 1e6 + (h.replica ?? 0) * 1e3 + (h.ranks?.[0] ?? 0);
  const sorted = [...hosts].sort((a, b) => place(a) - place(b) || a.host.localeCompare(b.host, "en", { numeric: true }));
  const shorten = new Set(hosts.map(first)).size === hosts.length; // without domains
  return (
    hosts.length > 0 &&
    html`
      <section class="panel machines" aria-labelledby="hosts">
        <header><h2 id="hosts">Machines</h2><span class="quiet num">${counts.map(([n, state]) => `${n} ${state}`).join(", ")}</span></header>
        <div class="scroll" tabindex="0">
          <table class="hosts">
            <thead><tr><th scope="col">machine</th><th scope="col">state</th><th scope="col">ranks</th><th scope="col"><span class="hidden">order</span></th></tr></thead>
            <tbody>${sorted.map((host) => html`<${Host} key=${host.host} host=${host} label=${shorten ? first(host) : host.host} live=${live} />`)}</tbody>
          </table>
        </div>
      </section>
    `
  );
}

function Host({ host: { host, state, replica, ranks, why }, label, live }) {
  const action = why ? "undrain" : "drain";
  return html`
    <tr class=${`is-${state}`} title=${ABOUT[state]}>
      <th scope="row" title=${host}>${label}</th>
      <td>${state}</td>
      <td class="num quiet">${replica !== null && html`<button type="button" class="link" onClick=${() => store.set({ replica })}>r${replica}</button> ${ranksOf(ranks)}`}</td>
      <td>${live && html`<button type="button" class="link" aria-label=${`${action} ${host}`} onClick=${() => store.set({ asked: { action, host }, notice: null })}>${action}</button>`}</td>
    </tr>
    ${why && html`<tr class="why"><td colspan="4">${why}</td></tr>`}
  `;
}
