import os, sys, time, json, contextlib, torch, warnings
sys.path.insert(0,"src")
import ebbtide
from benchmarks.workloads import *
from benchmarks.measure import *
from ebbtide.engine.process import PROCESS
torch.backends.cuda.matmul.allow_tf32=False
print(torch.__version__, torch.cuda.get_device_name(), flush=True)
# odometer on cuda
x=torch.randn(4,device="cuda"); a=x.detach(); a.data=torch.empty(0); x.add_(1); print("odometer", a._version, x._version)
print(link_rate(), flush=True)
# small correctness
torch.use_deterministic_algorithms(True, warn_only=True)
m=torch.nn.Sequential(*[torch.nn.TransformerEncoderLayer(256,4,512,batch_first=True) for _ in range(4)]).cuda()
inp=torch.randn(8,128,256,device="cuda")
def run(ctxf,steps=5):
    torch.manual_seed(1); out=[]
    for s in range(steps):
        m.zero_grad()
        with ctxf(): l=m(inp).pow(2).mean()
        l.backward(); out+=[l.detach().clone()]+[p.grad.clone() for p in m.parameters()]
    return out
ref=run(contextlib.nullcontext)
for w in ("1B","1MiB","64MiB"):
    got=run(lambda: ebbtide.offload_activations(window=w,prefetch=w,min_bytes=1,host_limit="2GiB"))
    print("bitwise",w,all(torch.equal(a,b) for a,b in zip(ref,got)))
torch.use_deterministic_algorithms(False)
# host cost
def cost(n, ctxf, k=1):
    w=torch.randn(n,n,device="cuda",requires_grad=True) if False else None
    t=torch.randn(n,device="cuda",requires_grad=True)
    best=1e9
    for r in range(8):
        torch.cuda.synchronize(); t0=time.perf_counter()
        with ctxf():
            y=t*1
            for i in range(200): y=y.exp() if k else y.neg()
        s=y.sum(); t1=time.perf_counter(); s.backward(); t2=time.perf_counter(); torch.cuda.synchronize()
        best=min(best,t2-t0)
    return best/200*1e6
for n,name in ((1000,"kept"),(300000,"moved")):
    base=cost(n,contextlib.nullcontext)
    c=cost(n,lambda: ebbtide.offload_activations(window="1MiB",prefetch="4MiB",host_limit="4GiB"))
    print("host cost us per save",name,"base",base,"with",c,"diff",c-base,flush=True)
PROCESS.close()
for wl in (A,A_COMPILED):
    torch._dynamo.reset()
    model,f=build(wl,torch.device("cuda"))
    modes={"nothing":contextlib.nullcontext,"ebbtide":lambda: ebbtide.offload_activations(host_limit="60GiB"),
      "ebbtide-256":lambda: ebbtide.offload_activations(host_limit="60GiB",window="256MiB",prefetch="512MiB"),
      "none-qualifies":lambda: ebbtide.offload_activations(host_limit="60GiB",min_bytes="100GiB"),"nothing2":contextlib.nullcontext}
    for name,c in modes.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            t0=time.time(); r=steps(model,f,c,4)
        print(wl.name,name,json.dumps(r.summary()),"total",round(time.time()-t0,1), "after", [b-r.after_bytes[0] for b in r.after_bytes],flush=True)
        cc=c()
        if hasattr(cc,"stats"):
            st=cc.stats(); n=6
            print({k:((v.count/n,round(v.nbytes/n/2**30,3)) if hasattr(v,'count') else v) for k,v in vars(st).items() if k!='kept'}, {r.name:(t.count/n,t.nbytes/n/2**30) for r,t in st.kept.items()}, "GB/s",st.out_gb_per_s,st.in_gb_per_s,flush=True)
            print(torch.cuda.host_memory_stats().get("num_host_alloc"), flush=True)
    # E5 sync debug
    torch.cuda.set_sync_debug_mode("error")
    try:
        with ebbtide.offload_activations(host_limit="60GiB"): l=f()
        l.backward(); print("no sync ok")
    except Exception as e: print("SYNC", repr(e)[:300])
    torch.cuda.set_sync_debug_mode("default")
    del model,f
    import gc; gc.collect(); torch.cuda.empty_cache()
