//! Terminal of `coreward top`, including its keys and its requests to the controller.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use coreward_http::client::ControllerClient;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::signal::unix::{SignalKind, signal};

use crate::model::{ControllerAnswer, PageModel};
use crate::page::{draw_page, full_page_height};
use crate::view::ServerListView;

const CONTROLLER_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a slow answer, as a multiple of the time that the answer took. It limits the controller's load, because
/// the status of a large fleet has several MB.
const SLOW_ANSWER_PAUSE_FACTOR: u32 = 4;
/// Width in columns of the page that is printed as text.
const TEXT_PAGE_COLUMNS: u16 = 120;
const MAX_TEXT_PAGE_LINES: u16 = 400;

/// Shows the page until the user presses q. With `print_once` or without a terminal, returns the page as text instead.
pub fn run_top(client: &ControllerClient, print_once: bool) -> anyhow::Result<Option<String>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut model = PageModel::default();
    runtime.block_on(async {
        model.apply_controller_answer(ControllerAnswer::Status(Box::new(client.status(false).await?)));
        model.apply_controller_answer(ControllerAnswer::Loads(client.loads().await?));
        anyhow::Ok(())
    })?;
    if print_once || !std::io::stdout().is_terminal() {
        // A rate can only be computed from two samples.
        runtime.block_on(async {
            tokio::time::sleep(CONTROLLER_POLL_INTERVAL).await;
            model.apply_controller_answer(ControllerAnswer::Loads(client.loads().await?));
            anyhow::Ok(())
        })?;
        return Ok(Some(render_page_as_text(&model)?));
    }
    let (sender, answer_receiver) = mpsc::channel();
    let client = client.clone();
    let stop_flag = Arc::new(AtomicBool::new(false));
    let signal_stop_flag = stop_flag.clone();
    let run_poll_thread = move || {
        runtime.block_on(async {
            tokio::select! {
                () = poll_controller(&client, &sender) => {}
                _ = wait_for_signal() => signal_stop_flag.store(true, Ordering::Relaxed),
            }
        });
    };
    std::thread::Builder::new().name("asks".to_owned()).spawn(run_poll_thread)?;
    let mut terminal = ratatui::try_init()?;
    let outcome = run_event_loop(&mut terminal, model, &answer_receiver, &stop_flag);
    ratatui::try_restore()?;
    outcome.map(|()| None)
}

/// Waits for SIGTERM or SIGHUP. Handling the signal gives time to restore the terminal before the process ends.
async fn wait_for_signal() -> std::io::Result<()> {
    let (mut terminate, mut hangup) = (signal(SignalKind::terminate())?, signal(SignalKind::hangup())?);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Polls the controller until the receiver of its answers is dropped.
async fn poll_controller(client: &ControllerClient, answer_sender: &Sender<ControllerAnswer>) {
    loop {
        let start_time = Instant::now();
        let answers = match (client.loads().await, client.status(false).await) {
            (Ok(loads), Ok(status)) => vec![ControllerAnswer::Status(Box::new(status)), ControllerAnswer::Loads(loads)],
            (Err(error), _) | (_, Err(error)) => vec![ControllerAnswer::Problem(format!("{error:#}"))],
        };
        for event in answers {
            if answer_sender.send(event).is_err() {
                return;
            }
        }
        let poll_duration = start_time.elapsed();
        tokio::time::sleep(
            CONTROLLER_POLL_INTERVAL.saturating_sub(poll_duration).max(poll_duration * SLOW_ANSWER_PAUSE_FACTOR),
        )
        .await;
    }
}

fn run_event_loop(
    terminal: &mut ratatui::DefaultTerminal,
    mut model: PageModel,
    answer_receiver: &Receiver<ControllerAnswer>,
    stop_flag: &AtomicBool,
) -> anyhow::Result<()> {
    let mut view = ServerListView::default();
    while !stop_flag.load(Ordering::Relaxed) {
        terminal.draw(|frame| draw_page(frame, &model, &mut view))?;
        // The page is drawn at least every 200 ms, because there may be new answers, and at once after a key.
        if event::poll(Duration::from_millis(200))?
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
        {
            let server_count = model.status.as_ref().map_or(0, |status| status.servers.len());
            if !view.handle_key(key, server_count) {
                return Ok(());
            }
        }
        answer_receiver.try_iter().for_each(|event| model.apply_controller_answer(event));
    }
    Ok(())
}

/// Returns the page as text. Its height depends on its content.
fn render_page_as_text(model: &PageModel) -> anyhow::Result<String> {
    let height = model.status.as_ref().map_or(1, full_page_height).min(MAX_TEXT_PAGE_LINES);
    let mut terminal = Terminal::new(TestBackend::new(TEXT_PAGE_COLUMNS, height))?;
    terminal.draw(|frame| draw_page(frame, model, &mut ServerListView::default()))?;
    Ok(page_text(terminal.backend()))
}

pub(crate) fn page_text(backend: &TestBackend) -> String {
    let buffer = backend.buffer();
    let width = usize::from(buffer.area.width.max(1));
    let lines = buffer.content().chunks(width).map(|cells| {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        format!("{}\n", line.trim_end())
    });
    lines.collect()
}
