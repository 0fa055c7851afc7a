// A web backend that knows nothing but the library @fanoutio/grip: it holds requests that the edge has signed, and
// publishes. Settings come as one JSON object in the environment, commands as lines on stdin; answers go to stdout.
import http from "node:http";
import readline from "node:readline";
import { Channel, GripInstruct, HttpResponseFormat, HttpStreamFormat, Publisher } from "@fanoutio/grip";

const { publish, publishKey, sigKey, channel } = JSON.parse(process.env.INTEROP);
const publisher = new Publisher({
  control_uri: publish,
  control_iss: "interop",
  key: publishKey,
  verify_iss: "up-streamer",
  verify_key: new TextEncoder().encode(sigKey),
});
const say = (what) => console.log(JSON.stringify(what));

const server = http.createServer(async (request, response) => {
  const { isProxied, isSigned } = await publisher.validateGripSig(request.headers["grip-sig"]);
  if (!isProxied || !isSigned) {
    response.writeHead(501, { "Content-Type": "text/plain" });
    response.end("expected a request by way of a GRIP proxy\n");
    return;
  }
  const url = new URL(request.url, "http://backend");
  const instruct = new GripInstruct(new Channel(channel, "1"));
  if (url.pathname === "/poll") {
    instruct.setHoldLongPoll(20);
    instruct.setStatus(202);
  } else {
    instruct.setHoldStream();
    instruct.setKeepAlive("\n", 25);
    instruct.setNextLink("/link", 120);
  }
  if (url.pathname === "/link") {
    instruct.channels = [new Channel(channel, "3")];
    say({ link: request.headers["grip-last"] });
  }
  const body = { "/poll": "nothing\n", "/link": "3\n" }[url.pathname] ?? "1\n";
  response.writeHead(200, { "Content-Type": "text/plain", ...instruct.toHeaders() });
  response.end(body);
});

const formats = {
  stream: ({ text }) => new HttpStreamFormat(text),
  bytes: ({ text }) => new HttpStreamFormat(new TextEncoder().encode(text + "\u0000")),
  close: () => new HttpStreamFormat(null, true),
  response: ({ text }) => new HttpResponseFormat({ code: 201, headers: { "X-One": "1" }, body: text }),
};

server.listen(0, "127.0.0.1", () => say({ port: server.address().port }));
for await (const line of readline.createInterface({ input: process.stdin })) {
  const command = JSON.parse(line);
  try {
    await publisher.publishFormats(channel, formats[command.what](command), command.id, command.prevId);
    say({ published: command.id ?? "" });
  } catch (error) {
    say({ failed: error.message });
  }
}
server.close();
