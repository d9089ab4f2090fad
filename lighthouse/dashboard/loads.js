// What ranks have measured of themselves and of their machines, in one line each; "": nothing.
import { percent, short } from "./time.js";

const bytes = (n) => (n < 1e6 ? `${short(n / 1e6)} MB` : `${short(n)}B`);
const PARTS = [
  ["rank_cpu_ratio", (x) => `CPU ${percent(x, 0)}`],
  ["rank_resident_bytes", (n) => `memory ${bytes(n)}`],
  ["gpu_utilization_ratio", (x) => `GPU ${percent(x, 0)}`],
  ["gpu_memory_used_bytes", (n, { gpu_memory_bytes: all }) => `${short(n / 1e9)} of ${bytes(all)}`],
  ["gpu_power_watts", (n) => `${short(n)} W`],
  ["gpu_temperature_celsius", (n) => `${n} °C`],
  ["gpu_xid", (n) => n > 0 && `Xid ${n}`],
  ["host_memory_available_bytes", (n, { host_memory_bytes: all }) => `free: ${bytes(n)} of ${bytes(all)} memory`],
  ["host_run_free_bytes", (n) => `${bytes(n)} for the run`],
  ["host_checkpoint_free_bytes", (n) => `${bytes(n)} for checkpoints`],
  ["host_received_bytes_per_second", (n, { host_sent_bytes_per_second: out }) => `network in ${bytes(n)}/s, out ${bytes(out)}/s`],
  ["host_clock_ahead_seconds", (s) => Math.abs(s) >= 1 && `clock ${short(Math.abs(s))} s ${s > 0 ? "ahead" : "behind"}`],
];

export const inWords = (load) => PARTS.map(([name, text]) => name in load && text(load[name], load)).filter(Boolean).join(", ");
