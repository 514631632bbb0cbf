// A streamed chat with grpc-js; the .proto is loaded as it is. Ctrl-C cancels the call, which stops the work.
//
//   npm ci
//   node chat.mjs [HOST:PORT [QUESTION]]

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { fileURLToPath } from "node:url";

const [address = "127.0.0.1:50051", question = "What is gravity?"] = process.argv.slice(2);
const proto = fileURLToPath(new URL("../../proto/fulcrum/v1/inference.proto", import.meta.url));
const { fulcrum } = grpc.loadPackageDefinition(loadSync(proto, { keepCase: true, longs: String, enums: String, oneofs: true }));

const client = new fulcrum.v1.InferenceService(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.FULCRUM_API_KEY) metadata.set("authorization", `Bearer ${process.env.FULCRUM_API_KEY}`);

const call = client.Generate(
  {
    chat: { messages: [{ role: "user", content: [{ text: question }] }] },
    sampling: { temperature: 0 },
    stopping: { max_tokens: 16 },
  },
  metadata,
  { deadline: Date.now() + 60_000 },
);
process.on("SIGINT", () => call.cancel());

call.on("data", (response) => {
  if (response.event === "delta") process.stdout.write(response.delta.text);
  if (response.event === "finished") process.stdout.write(`\n[${response.finished.reason}]\n`);
  if (response.event === "usage") process.stdout.write(`[${response.usage.completion_tokens} tokens]\n`);
});
call.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
call.on("status", () => client.close());
