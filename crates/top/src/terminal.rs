//! Keys in, pages out.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use coreward_api::client::Client;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::signal::unix::{SignalKind, signal};

use crate::model::{ClientEvent, Model};
use crate::page::{draw, full_height};
use crate::view::View;

/// Time between two looks at the loads.
const INTERVAL: Duration = Duration::from_secs(1);
/// After an answer that took long nothing is asked for so many times as long: a large fleet's status is some MB.
const REST: u32 = 4;
/// A page without a terminal.
const COLUMNS: u16 = 120;
const MOST_LINES: u16 = 400;

/// Shows the page until somebody presses q; `once`, and where standard output is no terminal: as text, once. Returns that text.
///
/// # Errors
/// When the controller does not answer to begin with, or the terminal cannot be used.
pub fn run(client: &Client, once: bool) -> anyhow::Result<Option<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut seen = Model::default();
    runtime.block_on(async {
        seen.take(ClientEvent::Status(Box::new(client.status(false).await?)));
        seen.take(ClientEvent::Loads(client.loads().await?));
        anyhow::Ok(())
    })?;
    if once || !std::io::stdout().is_terminal() {
        // Rates are between two counts.
        runtime.block_on(async {
            tokio::time::sleep(INTERVAL).await;
            seen.take(ClientEvent::Loads(client.loads().await?));
            anyhow::Ok(())
        })?;
        return Ok(Some(text(&seen)?));
    }
    let (sender, heard) = mpsc::channel();
    let client = client.clone();
    let ended = Arc::new(AtomicBool::new(false));
    let told = ended.clone();
    let beside = move || {
        runtime.block_on(async {
            tokio::select! {
                () = ask(&client, &sender) => {}
                _ = signalled() => told.store(true, Ordering::Relaxed),
            }
        });
    };
    std::thread::Builder::new().name("asks".to_owned()).spawn(beside)?;
    let mut terminal = ratatui::try_init()?;
    let outcome = event_loop(&mut terminal, seen, &heard, &ended);
    ratatui::try_restore()?;
    outcome.map(|()| None)
}

/// Until somebody else ends this process, who should find the terminal as it was.
async fn signalled() -> std::io::Result<()> {
    let (mut terminate, mut hangup) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Asks the controller again and again, until nobody listens.
async fn ask(client: &Client, sender: &Sender<ClientEvent>) {
    loop {
        let begun = Instant::now();
        let heard = match (client.loads().await, client.status(false).await) {
            (Ok(loads), Ok(status)) => vec![ClientEvent::Status(Box::new(status)), ClientEvent::Loads(loads)],
            (Err(error), _) | (_, Err(error)) => vec![ClientEvent::Problem(format!("{error:#}"))],
        };
        for heard in heard {
            if sender.send(heard).is_err() {
                return;
            }
        }
        let took = begun.elapsed();
        tokio::time::sleep(INTERVAL.saturating_sub(took).max(took * REST)).await;
    }
}

fn event_loop(
    terminal: &mut ratatui::DefaultTerminal,
    mut seen: Model,
    heard: &Receiver<ClientEvent>,
    ended: &AtomicBool,
) -> anyhow::Result<()> {
    let mut view = View::default();
    while !ended.load(Ordering::Relaxed) {
        terminal.draw(|frame| draw(frame, &seen, &mut view))?;
        // The page is drawn again when there is something new, and a key need not wait for it.
        if event::poll(Duration::from_millis(200))?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
        {
            let servers = seen.status.as_ref().map_or(0, |status| status.servers.len());
            if !view.press(key, servers) {
                return Ok(());
            }
        }
        heard.try_iter().for_each(|heard| seen.take(heard));
    }
    Ok(())
}

/// One page as text, as high as it need be.
fn text(seen: &Model) -> anyhow::Result<String> {
    let lines = seen.status.as_ref().map_or(1, full_height).min(MOST_LINES);
    let mut terminal = Terminal::new(TestBackend::new(COLUMNS, lines))?;
    terminal.draw(|frame| draw(frame, seen, &mut View::default()))?;
    Ok(page_text(terminal.backend()))
}

/// What stands on a page, without colours.
pub(crate) fn page_text(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let width = usize::from(buffer.area.width.max(1));
    let lines = buffer.content().chunks(width).map(|cells| {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        format!("{}\n", line.trim_end())
    });
    lines.collect()
}
