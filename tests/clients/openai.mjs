// Prints what OpenAI's client sees at the gateway. Arguments: URL, GUARDED_URL, MODEL.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, guarded, model] = process.argv.slice(2);
const connect = (baseURL) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).chat.completions;
const chat = connect(url);
const ask = (content) => ({ model, messages: [{ role: "user", content }] });
const question = ask("Where is it warm?");

const whole = await chat.create({ ...question, max_completion_tokens: 5 });
const chunks = [];
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await chat.create({ ...question, ...options })) chunks.push(chunk);

const Person = z.object({ name: z.string(), age: z.number().int() });
const form = { ...question, response_format: zodResponseFormat(Person, "person") };
const forms = [await chat.parse(form), await chat.stream(form).finalChatCompletion()];
const [asked] = question.messages;
const follow = await chat.create({ model, messages: [asked, ...forms.map((form) => form.choices[0].message), asked] });

const weather = {
  name: "weather",
  parameters: { type: "object", properties: { city: { type: "string" } } },
  parse: JSON.parse,
  function: ({ city }) => `18 degrees in ${city}`,
};
const loop = { ...question, tools: [{ type: "function", function: weather }] };

const refusal = async (at, wrong) => {
  const error = await connect(at).create({ ...question, ...wrong }).catch((error) => error);
  return [error.constructor.name, error.status, error.param];
};

const seen = {
  chat: [whole, follow].map((answer) => answer.choices[0].message.content),
  usage: [whole, chunks.at(-1)].map(({ usage }) => [usage.prompt_tokens, usage.completion_tokens]),
  stream: [chunks.map((chunk) => chunk.choices[0]?.delta.content).filter(Boolean)],
  schema: forms.map((form) => form.choices[0].message.parsed),
  tool: [await chat.runTools(loop).finalContent(), await chat.runTools({ ...loop, stream: true }).finalContent()],
  refusals: [
    await refusal(guarded),
    await refusal(url, { model: "gpt-4o" }),
    await refusal(url, { temperature: 3 }),
    await refusal(url, ask("busy")),
    await refusal(url, ask("long")),
  ],
};
console.log(JSON.stringify(seen));
