// What is trained, and how: the model and the keys of the configuration that say most.
import { html } from "./html.js";
import { useStore } from "./store.js";
import { count, short } from "./time.js";

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
