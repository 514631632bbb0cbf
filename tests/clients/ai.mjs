// Prints what the AI SDK sees at the gateway. Arguments: URL, GUARDED_URL, MODEL.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // standard output is for the result
const [url, guarded, model] = process.argv.slice(2);
const features = { includeUsage: true, supportsStructuredOutputs: true };
const connect = (baseURL) => createOpenAICompatible({ name: "fulcrum", baseURL, apiKey: "none", ...features });
const question = { model: connect(url)(model), prompt: "Where is it warm?", maxRetries: 0 };

const whole = await generateText({ ...question, system: "Be brief.", maxOutputTokens: 5 });
const streamed = streamText(question);
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);

const Person = z.object({ name: z.string(), age: z.number().int() });
const form = { ...question, output: Output.object({ schema: Person }) };

const weather = tool({ inputSchema: z.object({ city: z.string() }), execute: ({ city }) => `18 degrees in ${city}` });
const loop = { ...question, tools: { weather }, stopWhen: stepCountIs(2) };

// OpenAI's own provider speaks the Responses API, and refers to stored items unless it is told that there are none.
const responses = { model: createOpenAI({ baseURL: url, apiKey: "none" })(model), providerOptions: { openai: { store: false } } };

const refusal = async (wrong) => {
  const error = await generateText({ ...question, ...wrong }).catch((error) => error);
  return [error.name, error.statusCode, error.data?.error.param];
};

const seen = {
  chat: [whole.text],
  usage: [whole.usage, await streamed.usage].map((usage) => [usage.inputTokens, usage.outputTokens]),
  stream: [pieces],
  schema: [(await generateText(form)).output, await streamText(form).output],
  tool: [
    (await generateText(loop)).text,
    (await streamText(loop).steps).at(-1).text,
    (await generateText({ ...loop, ...responses })).text,
  ],
  refusals: [
    await refusal({ model: connect(guarded)(model) }),
    await refusal({ model: connect(url)("gpt-4o") }),
    await refusal({ temperature: 3 }),
    await refusal({ prompt: "busy" }),
    await refusal({ prompt: "long" }),
  ],
};
console.log(JSON.stringify(seen));
