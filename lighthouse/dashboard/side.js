// The panels beside the lanes: where the time went, the machines (those that need a look first), and what is trained.
import { html } from "./html.js";
import { inWords } from "./loads.js";
import { store, useStore } from "./store.js";
import { count, percent, short, span } from "./time.js";

const CAUSES = {
  startup: "before the first step",
  detect: "failure not seen yet",
  quorum: "waiting for an epoch",
  reconnect: "building the ring",
  fetch: "waiting for state",
  missing: "fewer contributors",
  replay: "steps done twice",
  evaluation: "losses on other data",
  ftar: "exposed all-reduce",
  commit: "agreeing on the step",
  other: "none of these",
};

export function Effective() {
  const effective = useStore((s) => s.overview.effective);
  const { wall_s: wall, useful_s: useful, lost_s: lost } = effective;
  const causes = Object.entries(lost).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1]);
  const parts = [["useful", useful], ...causes];
  return html`
    <section class="panel effective" aria-labelledby="effective">
      <header><h2 id="effective">Effective training time</h2><span class="quiet num" title="what a model of the job makes of its failures and of the usual cost of each; compare it with replay">of ${span(wall)}${effective.predicted === null ? "" : `; predicted ${percent(effective.predicted, 2)}`}</span></header>
      <dl class="shares">
        <div title="share of the time since the job began that trained the model; a step that was done twice counts twice"><dt>wall clock</dt><dd class="num big">${percent(effective.wall_clock, 2)}</dd></div>
        <div title="share of the time that failures alone left: t / (t + lost), where t is the time that trained"><dt>renewal</dt><dd class="num">${effective.renewal === null ? "–" : percent(effective.renewal, 2)}</dd></div>
        <div title="as wall clock; a step that was done twice counts once"><dt>with replay</dt><dd class="num">${percent(effective.with_replay, 2)}</dd></div>
      </dl>
      <div class="stack" role="img" aria-label=${`Useful ${percent(useful / wall)}; the table below has the rest`}>
        ${parts.map(([name, s]) => html`<span key=${name} class=${`part l-${name}`} style=${{ flexGrow: `${s}` }} title=${`${name} ${span(s)}`} />`)}
      </div>
      <table class="causes">
        <thead class="hidden"><tr><th>cause</th><th>share</th><th>time</th><th>percent</th></tr></thead>
        <tbody>
          <tr><th scope="row"><i class="dot l-useful" />useful</th><td class="about">full steps</td><td class="num">${span(useful)}</td><td class="num quiet">${percent(useful / wall)}</td></tr>
          ${causes.map(
            ([name, s]) => html`<tr key=${name}>
              <th scope="row"><i class=${`dot l-${name}`} />${name}</th>
              <td class="about" title=${CAUSES[name] ?? ""}>${CAUSES[name] ?? ""}</td>
              <td class="num">${span(s)}</td><td class="num quiet">${percent(s / wall, 2)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </section>
  `;
}

const HOST_STATES = {
  silent: "its agent is not heard",
  leaving: "its ranks leave after the present step",
  cordoned: "it gets no ranks until an operator lets it have some",
  waiting: "its replica lacks another machine",
  used: "ranks run there",
  spare: "it takes the place of a machine that is lost, or leaves",
};
const ORDER = Object.keys(HOST_STATES);
const NO_HOSTS = [];

const ranksOf = (ranks) => (ranks.length > 1 ? `${ranks[0]}–${ranks.at(-1)}` : ranks[0]);
const first = ({ host }) => host.split(".")[0];

export function Hosts() {
  const known = useStore((s) => s.overview.hosts ?? NO_HOSTS);
  const loads = useStore((s) => s.overview.loads);
  const replicas = useStore((s) => s.overview.replicas);
  const live = useStore((s) => s.overview.job.live);
  // The name by which ranks know their host may be another one than its agent's; under torchrun there is no agent.
  const inside = ({ host, replica, ranks }) => replicas.find((r) => r.replica === replica)?.ranks.find((r) => r.rank === ranks?.[0])?.host ?? host;
  const others = Object.keys(loads).filter((host) => inWords(loads[host]) && !known.map(inside).includes(host));
  const hosts = [...known, ...others.map((host) => ({ host, state: "", replica: null, why: "" }))];
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
            <tbody>${sorted.map((host) => html`<${Host} key=${host.host} host=${host} label=${shorten ? first(host) : host.host} load=${inWords(loads[inside(host)] ?? {})} live=${live} />`)}</tbody>
          </table>
        </div>
      </section>
    `
  );
}

function Host({ host: { host, state, replica, ranks, why }, label, load, live }) {
  const action = why ? "undrain" : "drain";
  return html`
    <tr class=${`is-${state}`} title=${HOST_STATES[state]}>
      <th scope="row" title=${host}>${label}</th>
      <td>${state}</td>
      <td class="num quiet">${replica !== null && html`<button type="button" class="link" onClick=${() => store.set({ replica })}>r${replica}</button> ${ranksOf(ranks)}`}</td>
      <td>${live && state && html`<button type="button" class="link" aria-label=${`${action} ${host}`} onClick=${() => store.set({ asked: { action, host }, notice: null })}>${action}</button>`}</td>
    </tr>
    ${load && html`<tr class="why"><td colspan="4" class="num">${load}</td></tr>`}
    ${why && html`<tr class="why"><td colspan="4">${why}</td></tr>`}
  `;
}

const OURS = "ft_hsdp.train.model.Transformer"; // for another model, most keys of the model and of its data do not count

const INTERVENTION = { none: "rate unchanged", linear: "rate × k / n", sqrt: "rate × √(k / n)" };

const plural = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

/** The rows of the panel: [label, value, what its tooltip says: the keys]. */
function rows({ job, run: { model, parameters, config } }) {
  const of = (key) => config[key];
  const found = [];
  if (model) found.push(["model", `${model.split(".").at(-1)}, ${short(parameters)} parameters`, model]);
  if (model === OURS) {
    const sequences = of("train.micro_batch") * of("train.accumulate") * job.ranks * job.total;
    const warm = of("lr.warmup") ? `, ${plural(of("lr.warmup"), "step")} of warm-up` : "";
    found.push(
      ["layers", `${of("model.layers")}, width ${of("model.dim")}, ${plural(of("model.heads"), "head")}`, "model.layers, model.dim, model.heads"],
      ["batch", `${count(sequences)} × ${count(of("train.seq_len"))} tokens`, "train.micro_batch × train.accumulate × ranks × replicas, train.seq_len"],
      ["data", of("data.path"), "data.path"],
      ["learning rate", `${of("optim.lr")}, ${of("lr.schedule")}${warm}`, "optim.lr, lr.schedule, lr.warmup"],
      ["optimizer", `weight decay ${of("optim.weight_decay")}, clip ${of("optim.clip") ?? "none"}`, "optim.weight_decay, optim.clip"],
    );
  }
  const most = job.slots > job.total ? `, up to ${job.slots}` : "";
  const spares = of("spares") ? `, ${plural(of("spares"), "spare")}` : "";
  found.push(["replicas", `${job.total} × ${plural(job.ranks, "rank")}${most}${spares}`, "replicas, ranks_per_replica, max_replicas, spares"]);
  if (Object.keys(config).length) {
    const every = of("checkpoint.every");
    found.push(
      ["with k of n", `${of("quorum.batch") === "constant" ? "constant batch, " : ""}${INTERVENTION[of("lr.intervention")]}; at least ${plural(of("quorum.min_replicas"), "replica")}`, "k of n wanted units are in a step: quorum.batch, lr.intervention, quorum.min_replicas"],
      ["checkpoint", every ? `every ${plural(every, "step")}` : "on demand", "checkpoint.every"],
      ["device", `${of("train.device")}, ${of("train.precision")}`, "train.device, train.precision"],
      ["seed", `${of("train.seed")}`, "train.seed: the initial weights and the order of the data follow from it"],
    );
  }
  return found;
}

export function Run() {
  const overview = useStore((s) => s.overview);
  return html`
    <section class="panel run" aria-labelledby="run">
      <header><h2 id="run">Run</h2><span class="quiet num">${plural(overview.job.steps, "step")}</span></header>
      <dl class="settings">
        ${rows(overview).map(([label, value, keys]) => html`<div key=${label} title=${keys}><dt>${label}</dt><dd>${value}</dd></div>`)}
      </dl>
    </section>
  `;
}
