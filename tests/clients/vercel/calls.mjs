// Calls of Vercel's `ai` to a server: `node calls.mjs URL` prints the results as JSON, by name.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  embedMany, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool,
} from "ai";
import { z } from "zod";

const url = process.argv[2];
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const openai = createOpenAI(options);
const anthropic = createAnthropic(options);
const compatible = createOpenAICompatible({
  name: "rootlace", supportsStructuredOutputs: true, includeUsage: true, ...options,
});
const models = {
  compatible: compatible("demo"),
  chat: openai.chat("demo"),
  responses: openai("demo"),
  anthropic: anthropic("demo"),
};
const asked = { prompt: "Who are you?", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const city = z.object({ name: z.string().max(12), large: z.boolean() });
const calculator = tool({
  description: "Computes.",
  inputSchema: z.object({ expression: z.string().max(12) }),
  execute: ({ expression }) => ({ asked: expression, result: 42 }),
});
const computes = {
  ...asked, prompt: "What is 12 + 30?", maxOutputTokens: 60, tools: { calculator },
};

async function collected(stream) {
  const found = [];
  for await (const one of stream) found.push(one);
  return found;
}

const calls = {
  async completion() {
    const { text, usage } = await generateText({
      ...asked, model: openai.completion("demo"), prompt: "Who are",
    });
    return { text, usage };
  },

  async embeddings() {
    const { embeddings } = await embedMany({
      model: openai.embedding("demo"),
      values: ["one", "two"],
      providerOptions: { openai: { dimensions: 8 } },
    });
    return embeddings;
  },

  async goes_on() {
    const first = await generateText({ ...asked, model: models.responses });
    const second = await generateText({
      ...asked,
      model: models.responses,
      prompt: "Hello",
      providerOptions: {
        openai: { previousResponseId: first.providerMetadata.openai.responseId },
      },
    });
    return { first: first.usage, second: second.usage };
  },

  async unknown_model() {
    try {
      await generateText({ ...asked, model: compatible("other") });
    } catch (error) {
      return { name: error.name, status: error.statusCode, message: error.message };
    }
  },
};

for (const [name, model] of Object.entries(models)) {
  calls[`text_${name}`] = async () => {
    const { text, finishReason, usage } = await generateText({ ...asked, model });
    return { text, finishReason, usage };
  };
  calls[`stream_${name}`] = async () => {
    const stream = streamText({ ...asked, model, onError() {} });
    const pieces = await collected(stream.textStream);
    return { pieces, finishReason: await stream.finishReason, usage: await stream.usage };
  };
  calls[`tools_${name}`] = async () => {
    const { steps } = await generateText({ ...computes, model, stopWhen: stepCountIs(2) });
    return steps.map((step) => ({
      text: step.text,
      calls: step.toolCalls.map((call) => call.input),
      results: step.toolResults.map((result) => result.output),
      usage: step.usage,
    }));
  };
  calls[`tool_stream_${name}`] = async () => {
    const given = { ...computes, model, toolChoice: "required", onError() {} };
    const parts = await collected(streamText(given).fullStream);
    return {
      deltas: parts.filter((one) => one.type === "tool-input-delta").map((one) => one.delta),
      calls: parts.filter((one) => one.type === "tool-call").map((one) => one.input),
    };
  };
  calls[`object_${name}`] = async () => {
    const given = { ...asked, maxOutputTokens: 80, model, schema: city };
    const { object } = await generateObject(given);
    const stream = streamObject({ ...given, onError() {} });
    const { output } = await generateText({
      ...asked, maxOutputTokens: 80, model, output: Output.object({ schema: city }),
    });
    return { object, output, parts: await collected(stream.partialObjectStream) };
  };
}

const found = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    found[name] = await call();
  } catch (error) {
    found[name] = { failed: `${error.name}: ${error.message}`, body: error.responseBody };
  }
}
console.log(JSON.stringify(found));
