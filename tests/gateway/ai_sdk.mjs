// An agent with Vercel's AI SDK: one tool, as many steps as it takes, and a second question. The responses provider
// refers to the stored texts of earlier answers. argv: provider, URL, key, "stream" or "whole".
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [provider, baseURL, apiKey, how] = process.argv.slice(2);
const made = provider === 'anthropic' ? createAnthropic({ baseURL, apiKey }) : createOpenAI({ baseURL, apiKey });
const ask = {
  model: provider === 'chat' ? made.chat('rollmill') : made('rollmill'),
  system: 'Be brief.',
  messages: [{ role: 'user', content: 'Look.' }],
  maxOutputTokens: 1000,
  stopWhen: stepCountIs(5),
  tools: {
    bash: tool({
      description: 'Run a command.',
      inputSchema: z.object({ command: z.string() }),
      execute: async ({ command }) => `ran ${command}`,
    }),
  },
};
for (const question of ['More?', null]) {
  const result = how === 'stream' ? streamText(ask) : await generateText(ask);
  console.log(await result.text);
  ask.messages.push(...(await result.responseMessages), { role: 'user', content: question });
}
