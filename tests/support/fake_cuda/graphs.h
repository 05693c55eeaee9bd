// Graphs: nodes, what is checked of them, and how they run. Part of driver.c.

CUresult cuGraphCreate(CUgraph* graph, unsigned flags) { IN_CONTEXT; (void)flags; *graph = calloc(1, sizeof(Graph)); return CUDA_SUCCESS; }
static void free_graph(Graph* g) {
  if (!g->destroyed || g->executables) return;
  for (size_t i = 0; i < g->count; ++i) {
    free(g->nodes[i]->values);
    free(g->nodes[i]->before);
    free(g->nodes[i]->programmatic);
    free(g->nodes[i]);
  }
  free(g->nodes);
  free(g);
}
CUresult cuGraphDestroy(CUgraph graph) { IN_CONTEXT; ((Graph*)graph)->destroyed = 1; free_graph((Graph*)graph); return CUDA_SUCCESS; }

static CUresult set_kernel(Node* n, const CUDA_KERNEL_NODE_PARAMS* k) {
  const Function* f = (const Function*)k->func;
  if (!f) return refuse(CUDA_ERROR_INVALID_VALUE, "a node without a function");
  const unsigned block[3] = {k->blockDimX, k->blockDimY, k->blockDimZ};
  if (f->block[0] && memcmp(f->block, block, sizeof block))
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s: a block of %u threads, it requires %u", f->name, block[0], f->block[0]);
  if ((int)k->sharedMemBytes > f->attribute)
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s: %u bytes of shared memory, %d are allowed", f->name, k->sharedMemBytes, f->attribute);
  if (!k->gridDimX || !k->gridDimY || !k->gridDimZ || k->gridDimX > 2147483647u || k->gridDimY > 65535 || k->gridDimZ > 65535)
    return refuse(CUDA_ERROR_INVALID_VALUE, "%s: a grid of %u x %u x %u", f->name, k->gridDimX, k->gridDimY, k->gridDimZ);
  if (!k->kernelParams || k->extra) return refuse(CUDA_ERROR_INVALID_VALUE, "%s: the fake wants kernelParams", f->name);
  n->kernel = *k;
  n->values = calloc(1, f->param_bytes + 8);
  for (int i = 0; i < f->params; ++i) {
    if (f->offset[i] + f->size[i] > f->param_bytes || !k->kernelParams[i])
      return refuse(CUDA_ERROR_INVALID_VALUE, "%s: parameter %d", f->name, i);
    memcpy(n->values + f->offset[i], k->kernelParams[i], f->size[i]);
    if (f->size[i] == sizeof(FakeMap) && !is_map(n->values + f->offset[i]))
      return refuse(CUDA_ERROR_INVALID_VALUE, "%s: parameter %d is no tensor map", f->name, i);
  }
  return CUDA_SUCCESS;
}
static CUresult set_copy(Node* n, const CUDA_MEMCPY3D* c) {
  n->copy = *c;
  const int to_host = c->dstMemoryType == CU_MEMORYTYPE_HOST, from_host = c->srcMemoryType == CU_MEMORYTYPE_HOST;
  const Block* to = block_of(to_host ? c->dstHost : (void*)c->dstDevice, c->WidthInBytes);
  const Block* from = block_of(from_host ? c->srcHost : (void*)c->srcDevice, c->WidthInBytes);
  const int flat = c->Height == 1 && c->Depth == 1 && !c->srcXInBytes && !c->srcY && !c->srcZ && !c->dstXInBytes && !c->dstY && !c->dstZ;
  if (!flat || !c->WidthInBytes) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy node that is not flat");
  if (!to || to->host != to_host) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy node to outside of memory");
  if (!from || from->host != from_host) return refuse(CUDA_ERROR_INVALID_VALUE, "a copy node from outside of memory");
  return CUDA_SUCCESS;
}
static CUresult set_fill(Node* n, const CUDA_MEMSET_NODE_PARAMS* f) {
  n->fill = *f;
  const Block* to = block_of((void*)f->dst, f->width);
  if (f->elementSize != 1 || f->height != 1 || !f->width || f->value > 255) return refuse(CUDA_ERROR_INVALID_VALUE, "a fill node not of bytes");
  return to && !to->host ? CUDA_SUCCESS : refuse(CUDA_ERROR_INVALID_VALUE, "a fill node outside of memory");
}
static int before(Node* n, Graph* g, const CUgraphNode* nodes, const CUgraphEdgeData* edges, size_t count) {
  n->before_count = count;
  n->before = calloc(count + 1, sizeof *n->before);
  n->programmatic = calloc(count + 1, 1);
  for (size_t i = 0; i < count; ++i) {
    size_t found = 0;
    while (found < g->count && g->nodes[found] != (Node*)nodes[i]) ++found;
    if (found == g->count) return 0;
    for (size_t j = 0; j < i; ++j)
      if (n->before[j] == (Node*)nodes[i]) return 0;
    n->before[i] = (Node*)nodes[i];
    if (!edges) continue;
    const int programmatic = edges[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
    const int port = programmatic ? CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC : CU_GRAPH_KERNEL_NODE_PORT_DEFAULT;
    if (edges[i].from_port != port || edges[i].to_port) return 0;
    if (programmatic && (n->type != CU_GRAPH_NODE_TYPE_KERNEL || n->before[i]->type != CU_GRAPH_NODE_TYPE_KERNEL)) return 0;
    n->programmatic[i] = programmatic;
  }
  return 1;
}
CUresult cuGraphAddNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* nodes, const CUgraphEdgeData* edges, size_t count,
                        CUgraphNodeParams* params) {
  IN_CONTEXT;
  Graph* g = (Graph*)graph;
  Node* n = calloc(1, sizeof *n);
  n->type = params->type;
  CUresult result = CUDA_SUCCESS;
  if (!before(n, g, nodes, edges, count)) result = refuse(CUDA_ERROR_INVALID_VALUE, "bad edges");
  else if (n->type == CU_GRAPH_NODE_TYPE_KERNEL) result = set_kernel(n, (const CUDA_KERNEL_NODE_PARAMS*)&params->kernel);
  else if (n->type == CU_GRAPH_NODE_TYPE_MEMCPY) result = set_copy(n, &params->memcpy.copyParams);
  else if (n->type == CU_GRAPH_NODE_TYPE_MEMSET) result = set_fill(n, (const CUDA_MEMSET_NODE_PARAMS*)&params->memset);
  else result = refuse(CUDA_ERROR_NOT_SUPPORTED, "the fake has no nodes of kind %d", n->type);
  if (result) {
    free(n->values);
    free(n->before);
    free(n->programmatic);
    free(n);
    return result;
  }
  if (!(g->count & (g->count + 1))) g->nodes = realloc(g->nodes, 2 * (g->count + 1) * sizeof *g->nodes);
  g->nodes[g->count++] = n;
  *node = (CUgraphNode)n;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  IN_CONTEXT;
  if (flags) return CUDA_ERROR_INVALID_VALUE;
  Executable* e = calloc(1, sizeof *e);
  e->graph = (Graph*)graph;
  ++e->graph->executables;
  *executable = (CUgraphExec)e;
  return CUDA_SUCCESS;
}
CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) { IN_CONTEXT; (void)stream; ((Executable*)executable)->uploaded = 1; return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec executable) {
  IN_CONTEXT;
  Graph* g = ((Executable*)executable)->graph;
  --g->executables;
  free_graph(g);
  free(executable);
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  IN_CONTEXT;
  if (stream != (CUstream)&stream_object) return CUDA_ERROR_INVALID_HANDLE;
  return push((Work){.kind = LAUNCH, .executable = (Executable*)executable});
}
static CUresult run_node(Node* n) {
  if (n->type == CU_GRAPH_NODE_TYPE_MEMSET) memset((void*)n->fill.dst, (int)n->fill.value, n->fill.width);
  if (n->type == CU_GRAPH_NODE_TYPE_MEMCPY) {
    const CUDA_MEMCPY3D* c = &n->copy;
    memmove(c->dstMemoryType == CU_MEMORYTYPE_HOST ? c->dstHost : (void*)c->dstDevice,
            c->srcMemoryType == CU_MEMORYTYPE_HOST ? c->srcHost : (void*)c->srcDevice, c->WidthInBytes);
  }
  if (n->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_SUCCESS;
  const Function* f = (const Function*)n->kernel.func;
  const unsigned grid[3] = {n->kernel.gridDimX, n->kernel.gridDimY, n->kernel.gridDimZ};
  void* values[MOST_PARAMS];
  for (int i = 0; i < f->params; ++i) values[i] = n->values + f->offset[i];
  if (!hook) return refuse(CUDA_ERROR_LAUNCH_FAILED, "no executor is installed");
  if (hook(f->library->image, f->library->size, f->name, grid, f->params, values, f->size))
    return refuse(CUDA_ERROR_LAUNCH_FAILED, "%s: the executor failed", f->name);
  return CUDA_SUCCESS;
}
// Whether a node can run. A kernel that does not wait can as soon as the one before its programmatic edge can, and so, being
// added later, runs first.
static int ready(const Node* n) {
  for (size_t i = 0; i < n->before_count; ++i) {
    const int early = n->programmatic[i] && !((const Function*)n->kernel.func)->waits;
    if (!n->before[i]->done && !(early && ready(n->before[i]))) return 0;
  }
  return 1;
}
static CUresult run_graph(Graph* g) {
  for (size_t i = 0; i < g->count; ++i) g->nodes[i]->done = 0;
  for (size_t left = g->count; left; --left) {
    Node* next = 0;
    for (size_t i = g->count; i-- && !next;) {
      Node* n = g->nodes[i];
      if (!n->done && ready(n)) next = n;
    }
    next->done = 1;
    CUresult result = run_node(next);
    if (result) return result;
  }
  return CUDA_SUCCESS;
}
