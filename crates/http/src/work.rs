//! Worker threads for slow answers, so that no answer delays another. The thread of connections only moves bytes.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{Problem, ProblemKind};

/// Number of threads, each of which makes one answer at a time.
pub(crate) const THREAD_COUNT: usize = 4;
/// Number of threads that may answer large bodies, so that threads remain for small ones.
const LARGE_THREADS: usize = 2;
/// Limit of waiting requests with a large body, which is in memory.
const LARGE_WAITING: usize = 16;

/// Expected work of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Milliseconds of work with thousands of servers.
    Small,
    /// Unbounded work: seconds for the worst documents.
    Large,
}

static LARGE_WORK_SLOTS: Semaphore = Semaphore::const_new(LARGE_THREADS);
static LARGE_ANSWER_SLOTS: Semaphore = Semaphore::const_new(LARGE_THREADS + LARGE_WAITING);

/// An encoded answer in JSON.
#[derive(Debug)]
pub struct Answer(Vec<u8>);

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let kind = HeaderValue::from_static("application/json");
        ([(header::CONTENT_TYPE, kind)], Body::from(self.0)).into_response()
    }
}

/// Computes and encodes an answer on a worker thread. Fails with the work's error, if too many requests wait, and after
/// a panic.
pub async fn answer<T: Serialize>(
    size: Size,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<Answer, Problem> {
    run(size, move || {
        let text = serde_json::to_vec(&work()?);
        text.map(Answer).map_err(|error| internal(&error))
    })
    .await?
}

/// Runs work on a worker thread. Fails if too many requests wait, and after a panic.
pub async fn run<T: Send + 'static>(size: Size, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let turn = acquire_permits(size).await?;
    let outcome = tokio::task::spawn_blocking(move || {
        // Held even if the caller has disconnected: the thread is in use until the end.
        let _turn = turn;
        work()
    });
    outcome.await.map_err(|error| internal(&error))
}

fn internal(error: &impl ToString) -> Problem {
    Problem::new(ProblemKind::Internal, error.to_string())
}

async fn acquire_permits(size: Size) -> Result<Option<(SemaphorePermit<'static>, SemaphorePermit<'static>)>, Problem> {
    if size == Size::Small {
        return Ok(None);
    }
    let place = LARGE_ANSWER_SLOTS.try_acquire().map_err(|_| {
        let detail = format!("{LARGE_WAITING} requests with large bodies wait already: expected fewer");
        Problem::new(ProblemKind::TooManyRequests, detail).retry_after(1)
    })?;
    let turn = LARGE_WORK_SLOTS.acquire().await.map_err(|error| internal(&error))?;
    Ok(Some((place, turn)))
}
