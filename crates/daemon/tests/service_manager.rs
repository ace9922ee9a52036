//! Test with a service manager that follows sd_notify(3). It has a process of its own, because the environment contains
//! the socket's address.

use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::sync::oneshot::Sender;

const MIN_WATCHDOG_MESSAGES: usize = 5;

fn count_watchdog_messages(messages: &[String]) -> usize {
    messages.iter().filter(|message| *message == "WATCHDOG=1").count()
}

/// Binds the service manager's socket. Writes its address and the watchdog's limit into the environment.
fn bind_notify_socket(directory: &Path) -> UnixDatagram {
    let socket_path = directory.join("notify");
    let socket = UnixDatagram::bind(&socket_path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // SAFETY: this is the only test of the process, and no other thread is there to read the environment.
    unsafe {
        std::env::set_var("NOTIFY_SOCKET", &socket_path);
        std::env::set_var("WATCHDOG_USEC", "20000");
        std::env::remove_var("WATCHDOG_PID");
    }
    socket
}

/// Returns the received messages up to STOPPING. Sends to `message_sender` after enough watchdog messages.
fn receive_until_stopping(socket: &UnixDatagram, message_sender: Sender<()>) -> Vec<String> {
    let mut received_messages: Vec<String> = Vec::new();
    let mut enough_messages_sender = Some(message_sender);
    while received_messages.last().is_none_or(|last| last != "STOPPING=1") {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        received_messages.push(String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned());
        if count_watchdog_messages(&received_messages) == MIN_WATCHDOG_MESSAGES {
            enough_messages_sender.take().into_iter().for_each(|sender| sender.send(()).unwrap());
        }
    }
    received_messages
}

/// Checks that readiness is reported first and the end last, and that the watchdog is only notified in between.
#[test]
fn service_manager_receives_ready_watchdog_and_stopping_messages() {
    let directory = tempfile::tempdir().unwrap();
    let socket = bind_notify_socket(directory.path());
    // The manager reads during the work, because the socket holds few datagrams, and further ones block the sender.
    let (message_sender, message_receiver) = tokio::sync::oneshot::channel();
    let manager = std::thread::spawn(move || receive_until_stopping(&socket, message_sender));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let start_time = Instant::now();
    // A signal stays pending until it is handled. This work does not handle SIGHUP, which must not end it.
    coreward_daemon::block_signals().unwrap();
    nix::sys::signal::raise(nix::sys::signal::Signal::SIGHUP).unwrap();
    let work = async {
        message_receiver.await?;
        let result = coreward_daemon::run_with_raised_watchdog_limit(Duration::from_secs(60), || "done");
        anyhow::ensure!(result == "done");
        anyhow::bail!("its own reason")
    };
    assert_eq!(runtime.block_on(coreward_daemon::run_until_shutdown(work)).unwrap_err().to_string(), "its own reason");
    let received = manager.join().unwrap();
    assert_eq!(received[0], "READY=1");
    let watchdog_message_count = count_watchdog_messages(&received);
    // The first message comes at once, and further ones every 10 ms unless the machine is slow.
    let max_watchdog_messages = 1 + start_time.elapsed().as_millis() as usize / 10;
    assert!(
        (MIN_WATCHDOG_MESSAGES..=max_watchdog_messages).contains(&watchdog_message_count),
        "at most {max_watchdog_messages}: {received:?}"
    );
    // While work blocks, the interval is longer. Then it is restored.
    let extension_count = received
        .windows(2)
        .filter(|message_pair| *message_pair == ["WATCHDOG_USEC=60000000", "WATCHDOG_USEC=20000"])
        .count();
    assert_eq!((extension_count, received.len()), (1, watchdog_message_count + 4), "{received:?}");
}
