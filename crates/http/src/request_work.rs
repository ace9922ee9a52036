//! Worker threads that compute answers, so that slow answers do not delay others. The thread of the connections only
//! transfers bytes.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{Problem, ProblemKind};

/// Number of worker threads that compute answers. Each computes one answer at a time.
pub(crate) const ANSWER_WORKER_THREAD_COUNT: usize = 4;
/// Maximum number of worker threads that compute large requests. The others remain free for small requests.
const MAX_LARGE_REQUEST_THREADS: usize = 2;
/// Maximum number of large requests that wait for a worker thread. Their bodies are held in memory.
const MAX_WAITING_LARGE_REQUESTS: usize = 16;

/// Size class of the work that a request causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestWorkSize {
    /// Work that takes milliseconds, even with thousands of servers.
    Small,
    /// Work without an upper limit, which takes seconds for the worst documents.
    Large,
}

static LARGE_REQUEST_WORK_SLOTS: Semaphore = Semaphore::const_new(MAX_LARGE_REQUEST_THREADS);
static LARGE_REQUEST_QUEUE_SLOTS: Semaphore =
    Semaphore::const_new(MAX_LARGE_REQUEST_THREADS + MAX_WAITING_LARGE_REQUESTS);

/// Answer of a handler, already encoded in JSON.
#[derive(Debug)]
pub struct JsonAnswer(Vec<u8>);

impl IntoResponse for JsonAnswer {
    fn into_response(self) -> Response {
        let media_type = HeaderValue::from_static("application/json");
        ([(header::CONTENT_TYPE, media_type)], Body::from(self.0)).into_response()
    }
}

/// Computes an answer on a worker thread, and encodes it in JSON. Fails if `work` returns an error or panics, or if too
/// many requests wait.
pub async fn compute_json_answer<T: Serialize>(
    size: RequestWorkSize,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<JsonAnswer, Problem> {
    run_on_worker_thread(size, move || {
        let json = serde_json::to_vec(&work()?);
        json.map(JsonAnswer).map_err(|error| internal_problem(&error))
    })
    .await?
}

/// Runs `work` on a worker thread. Fails if too many requests wait, or if `work` panics.
pub async fn run_on_worker_thread<T: Send + 'static>(
    size: RequestWorkSize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    let permits = acquire_large_request_permits(size).await?;
    let work_result = tokio::task::spawn_blocking(move || {
        // The permit is held even if the caller disconnects, because the work occupies its thread until it ends.
        let _permits = permits;
        work()
    });
    work_result.await.map_err(|error| internal_problem(&error))
}

fn internal_problem(error: &impl ToString) -> Problem {
    Problem::new(ProblemKind::Internal, error.to_string())
}

async fn acquire_large_request_permits(
    size: RequestWorkSize,
) -> Result<Option<(SemaphorePermit<'static>, SemaphorePermit<'static>)>, Problem> {
    if size == RequestWorkSize::Small {
        return Ok(None);
    }
    let queue_permit = LARGE_REQUEST_QUEUE_SLOTS.try_acquire().map_err(|_| {
        let detail = format!("{MAX_WAITING_LARGE_REQUESTS} requests with large bodies wait already: expected fewer");
        Problem::new(ProblemKind::TooManyRequests, detail).with_retry_after(1)
    })?;
    let work_permit = LARGE_REQUEST_WORK_SLOTS.acquire().await.map_err(|error| internal_problem(&error))?;
    Ok(Some((queue_permit, work_permit)))
}
