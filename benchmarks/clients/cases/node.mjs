import OpenAI from "openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, generateObject, tool, stepCountIs } from "ai";
import { z } from "zod";

const { MODEL_URL: URL, SCRIPTED_URL: SCRIPTED, MODEL_NAME: NAME } = process.env;
const ASK = "What is the weather in Oslo?";
const who = [{ role: "user", content: "Who are you?" }];
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "any", maxRetries: 0 });
const provider = (url) =>
  createOpenAICompatible({ name: "rooflax", baseURL: `${url}/v1`, apiKey: "any",
                           supportsStructuredOutputs: true });
const model = (url) => provider(url)(NAME);
const same = (a, b) => { if (a !== b) throw new Error(`${JSON.stringify(a)} is not ${JSON.stringify(b)}`); };
const city = z.object({ city: z.string().max(12), cold: z.boolean() });

const cases = {
  "openai: chat, whole and streamed": async () => {
    const ask = { model: NAME, messages: who, temperature: 0 };
    const whole = await client.chat.completions.create(ask);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    same(text, whole.choices[0].message.content);
  },
  "openai: responses": async () => {
    const answer = await client.responses.create({ model: NAME, input: "Who are you?" });
    same(answer.output_text.includes("rooflax"), true);
  },
  "ai: text, whole and streamed": async () => {
    const ask = { model: model(URL), prompt: "Who are you?", temperature: 0, maxRetries: 0 };
    const whole = await generateText(ask);
    let text = "";
    for await (const piece of streamText(ask).textStream) text += piece;
    same(text, whole.text);
  },
  "ai: object": async () => {
    const found = await generateObject({ model: model(URL), schema: city, prompt: "Oslo", maxRetries: 0 });
    same(typeof found.object.cold, "boolean");
  },
  "ai: tools": async () => {
    const get_weather = tool({ description: "Weather of a city", inputSchema: z.object({ city: z.string() }),
                               execute: async () => "12 degrees" });
    const found = await generateText({ model: model(SCRIPTED), tools: { get_weather }, prompt: ASK,
                                       stopWhen: stepCountIs(3), maxRetries: 0 });
    same(found.text, "It is 12 degrees.");
  },
};
for (const [name, run] of Object.entries(cases)) {
  let why = null;
  try { await run(); } catch (error) { why = String(error).slice(0, 300); console.error(error); }
  console.log("CASE " + JSON.stringify({ case: name, why }));
}
