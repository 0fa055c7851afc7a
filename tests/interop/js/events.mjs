// An EventSource of npm: a line of JSON for each event, and for each change of its connection.
import { EventSource } from "eventsource";

const say = found => console.log(JSON.stringify(found));
const source = new EventSource(process.argv[2]);
source.onopen = () => say("open");
source.onerror = () => say(source.readyState === EventSource.CLOSED ? "closed" : "error");
source.onmessage = event => say(JSON.parse(event.data).text);
source.addEventListener("gap", event => say(`gap ${JSON.parse(event.data).reason}`));
