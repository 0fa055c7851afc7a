import com.hivemq.embedded.EmbeddedHiveMQ;
import java.nio.file.Path;

/** HiveMQ CE with the configuration FOLDER/config.xml and its data in FOLDER: java Main FOLDER. Embedded, it lets everybody in. */
public class Main {
    public static void main(String[] arguments) throws Exception {
        Path folder = Path.of(arguments[0]);
        EmbeddedHiveMQ hivemq = EmbeddedHiveMQ.builder().withConfigurationFolder(folder)
            .withDataFolder(folder.resolve("data")).withExtensionsFolder(folder.resolve("extensions")).build();
        Runtime.getRuntime().addShutdownHook(new Thread(() -> hivemq.stop().join()));
        hivemq.start().join();
        Thread.currentThread().join();
    }
}
