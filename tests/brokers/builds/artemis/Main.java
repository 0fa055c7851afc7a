import java.nio.file.Path;
import org.apache.activemq.artemis.core.server.embedded.EmbeddedActiveMQ;

/** ActiveMQ Artemis with the configuration FOLDER/broker.xml: java Main FOLDER. */
public class Main {
    public static void main(String[] arguments) throws Exception {
        EmbeddedActiveMQ artemis = new EmbeddedActiveMQ();
        artemis.setConfigResourcePath(Path.of(arguments[0], "broker.xml").toUri().toString());
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                artemis.stop();
            } catch (Exception error) {
                error.printStackTrace();
            }
        }));
        artemis.start();
        Thread.currentThread().join();
    }
}
